"""Check the sample indices that Megatron caches as .npy files: which documents, where each sample begins, which order.

Megatron reads them without any check: a zeroed order trains on one sample again and again, without an error, and a
file that is cut off ends the run with a traceback. It also reads a file that is no array as a pickle, which can run any
code. Everything but the choice of the order follows from the corpus, so it is checked in full, in bounded memory.
Versions: megatron-core 0.12 to 0.15. Test: tests/data/test_sample_index.py.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROWS = 1 << 23  # rows that are checked at once

Array = npt.NDArray[Any]


def find_unreadable(files: list[Path]) -> dict[Path, str]:
    """The files that are no whole arrays of numbers, with the reason; no pickle is read."""
    problems = {}
    for path in files:
        try:
            np.load(path, allow_pickle=False, mmap_mode="r")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, EOFError, SyntaxError) as error:
            problems[path] = " ".join(str(error).split())[:200]
    return problems


def check_indices(
    documents: Array, samples: Array, order: Array, *, corpus: Array, lengths: Array, seq_length: int
) -> str:
    """What is wrong with the three indices of a GPTDataset, in one line; empty if nothing is.

    Args:
        documents: int32[num_epochs * num_documents], documents in the order in which they are joined.
        samples: int[num_samples + 1, 2], position in `documents` and token offset at which each sample begins.
        order: int[num_samples], the order in which the samples are read.
        corpus: int[num_documents], the documents that belong to the split.
        lengths: int32[documents of the file], tokens of each document.
        seq_length: tokens from the begin of one sample to that of the next.
    """
    if documents.ndim != 1 or samples.ndim != 2 or samples.shape[1:] != (2,) or order.ndim != 1:
        return f"arrays of the shapes {documents.shape}, {samples.shape} and {order.shape}"
    if len(order) != len(samples) - 1:
        return f"the order has {len(order)} entries for {len(samples) - 1} samples"
    return (
        _check_documents(documents, corpus)
        or _check_samples(documents, samples, lengths, seq_length)
        or ("" if _is_permutation(order) else "the order of the samples repeats some and leaves others out")
    )


def check_blend(datasets: Array, samples: Array, num_datasets: int) -> str:
    """What is wrong with the two indices of a BlendedDataset, in one line; empty if nothing is.

    Args:
        datasets: int16[num_samples], the dataset of each sample.
        samples: int64[num_samples], the sample's number in it: each dataset is read from its first sample on.
    """
    if datasets.ndim != 1 or datasets.shape != samples.shape:
        return f"arrays of the shapes {datasets.shape} and {samples.shape}"
    read = np.zeros(num_datasets, dtype=np.int64)
    for start, part in _parts(datasets):
        if part.min() < 0 or part.max() >= num_datasets:
            return f"a dataset number outside 0 to {num_datasets - 1}"
        for number in range(num_datasets):
            found = samples[start : start + len(part)][part == number]
            if not np.array_equal(found, np.arange(read[number], read[number] + len(found))):
                return f"samples of dataset {number} repeated or left out"
            read[number] += len(found)
    return ""


def _check_documents(documents: Array, corpus: Array) -> str:
    """Each document of the split as often as any other, and no other document."""
    if not len(corpus) or len(documents) % len(corpus):
        return f"{len(documents)} documents in all, of a split of {len(corpus)}"
    last = int(corpus.max())
    if documents.min() < 0 or documents.max() > last:
        return f"a document outside 0 to {last}"
    times = np.bincount(documents, minlength=last + 1)
    epochs = len(documents) // len(corpus)
    return "" if (times[corpus] == epochs).all() else "documents repeated or left out"


def _check_samples(documents: Array, samples: Array, lengths: Array, seq_length: int) -> str:
    """Each sample begins `seq_length` tokens after the one before; the last row may come sooner, at the end."""
    begins = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum(lengths[documents], out=begins[1:])
    for start, part in _parts(samples):
        at, offset = part[:, 0], part[:, 1]
        if at.min() < 0 or at.max() >= len(documents) or offset.min() < 0:
            return "a sample that begins outside the documents"
        begin = begins[at] + offset
        if (begin > begins[at + 1]).any():
            return "a sample that begins after the end of its document"
        wrong = np.flatnonzero(begin != np.arange(start, start + len(part)) * seq_length)
        if len(wrong) and start + wrong[0] < len(samples) - 1:
            return f"sample {start + wrong[0]} does not begin {seq_length} tokens after the one before"
    return ""


def _is_permutation(order: Array) -> bool:
    seen = np.zeros(len(order), dtype=bool)
    for _, part in _parts(order):
        if part.min() < 0 or part.max() >= len(order):
            return False
        seen[part] = True
    return bool(seen.all())


def _parts(array: Array) -> Iterator[tuple[int, Array]]:
    for start in range(0, len(array), ROWS):
        yield start, array[start : start + ROWS]


def replace_if_wrong(
    cache: Path | None, pattern: str, build: Callable[[], tuple[Array, ...]], check: Callable[..., str]
) -> tuple[tuple[Array, ...], dict[Path, str]]:
    """Let Megatron read or build its indices; delete files that are wrong, and let it build them again.

    Trainings that start at the same time, such as those of a pilot, do this one after the other: Megatron writes the
    files in place, and half a file of another training is not a damaged one.

    Args:
        cache: the folder of the cache files; None without a cache.
        pattern: of the names of these indices.
        build: reads the arrays from the cache, or builds and caches them.
        check: what is wrong with the arrays, or an empty text.

    Returns:
        the arrays, and the deleted files with the reason.
    """

    def files() -> list[Path]:
        return sorted(cache.glob(pattern)) if cache is not None else []

    with _locked(cache):
        deleted = find_unreadable(files())
        for path in deleted:
            path.unlink(missing_ok=True)
        arrays = build()
        if problem := check(*arrays):
            for path in files():
                deleted[path] = problem
                path.unlink(missing_ok=True)
            arrays = build()
    return arrays, deleted


@contextlib.contextmanager
def _locked(cache: Path | None) -> Iterator[None]:
    """Wait until no other process builds indices in the folder, where it can be written and has locks."""
    with contextlib.ExitStack() as stack:
        if cache is not None:
            with contextlib.suppress(OSError):
                cache.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((cache / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
