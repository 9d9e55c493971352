"""Standard errors over documents: against a bootstrap, paired against unpaired, and the documents of each label."""

from __future__ import annotations

import math
import types
from pathlib import Path

import numpy
import pytest

from training.document_losses import (
    DocumentLosses,
    documents_of_labels,
    documents_of_samples,
    load_first,
    save_first,
)


def _documents(seed: int, shift: float = 0.0, count: int = 400) -> DocumentLosses:
    """Documents of very different length and difficulty; `seed` changes only the small noise of each document."""
    fixed, noise = numpy.random.default_rng(0), numpy.random.default_rng(seed)
    tokens = fixed.integers(5, 400, count).astype(float)
    mean = fixed.normal(3.0, 0.8, count) + shift + noise.normal(0, 0.02, count)
    return DocumentLosses(numpy.arange(count), mean * tokens, tokens)


def test_the_error_is_that_of_resampled_documents() -> None:
    one, rng = _documents(1), numpy.random.default_rng(5)
    means = []
    for _ in range(2000):
        drawn = rng.integers(0, 400, 400)
        means.append(one.losses[drawn].sum() / one.tokens[drawn].sum())
    assert one.standard_error() == pytest.approx(numpy.std(means), rel=0.06)


def test_the_paired_error_of_a_change_is_much_smaller() -> None:
    first, later = _documents(1), _documents(2, shift=-0.05)
    found = later.change_since(first)
    assert found is not None
    change, error = found
    errors = first.standard_error(), later.standard_error()
    assert error and errors[0] and errors[1]
    unpaired = math.hypot(errors[0], errors[1])
    assert change == pytest.approx(-0.05, abs=3 * error) and error < unpaired / 20
    assert change == pytest.approx(later.losses.sum() / later.tokens.sum() - first.losses.sum() / first.tokens.sum())


def test_other_documents_are_not_compared_and_one_says_nothing() -> None:
    first, fewer = _documents(1), _documents(1, count=399)
    assert fewer.change_since(first) is None
    longer = DocumentLosses(first.documents, first.losses, first.tokens + 1)
    assert longer.change_since(first) is None
    assert _documents(1, count=1).standard_error() is None
    one_read = DocumentLosses(numpy.arange(2), numpy.array([3.0, 0.0]), numpy.array([1.0, 0.0]))
    assert one_read.standard_error() is None


def test_the_first_validation_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "first-validation.npz"
    assert load_first(path) is None
    one = _documents(1)
    save_first(path, 40, {"a.b": one})
    found = load_first(path)
    assert found is not None and found[0] == 40
    assert found[1]["a.b"].change_since(one) == (0.0, 0.0)
    path.write_bytes(path.read_bytes()[:200])
    assert load_first(path) is None


def test_labels_belong_to_their_documents() -> None:
    """Documents of 3, 4 and 6 tokens read in the order 2, 0, 1, in samples of 4 tokens and one label more."""
    dataset = types.SimpleNamespace(
        document_index=numpy.array([2, 0, 1], dtype=numpy.int32),
        sample_index=numpy.array([[0, 0], [0, 4], [1, 2], [2, 3]], dtype=numpy.int32),
        shuffle_index=numpy.array([1, 0, 2]),
        dataset=types.SimpleNamespace(sequence_lengths=numpy.array([3, 4, 6], dtype=numpy.int32)),
    )
    found = [documents_of_labels(dataset, i).tolist() for i in range(3)]
    assert found == [[2, 0, 0, 0], [2, 2, 2, 2], [1, 1, 1, 1]]  # tokens 5-8, 1-4, 9-12 of 2 2 2 2 2 2 0 0 0 1 1 1 1
    assert documents_of_samples(dataset, 2).tolist() == [0, 2]
