"""Losses summed by document, and the standard errors that follow from them. Imports no torch.

Tokens of one document are alike, so the documents are the independent observations: a validation of 4,000 tokens from
six documents says far less than 4,000 separate tokens would. The loss per token is a ratio of two sums over documents,
losses and tokens; its standard error is the usual one of a ratio (W. G. Cochran, Sampling Techniques, 1977, chapter 6).
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from common.files import write_atomic

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class DocumentLosses:
    """One validation of one domain, by document.

    Args:
        documents: int64[n], numbers of the documents in the validation split, ascending.
        losses: float64[n], sum of the losses (nats) of each document's tokens.
        tokens: float64[n], tokens of each document.
    """

    documents: NDArray[Any]
    losses: NDArray[Any]
    tokens: NDArray[Any]

    def standard_error(self) -> float | None:
        """Standard error of the mean loss per token (nats); None for fewer than two documents."""
        return _ratio_error(self.losses, self.tokens)

    def change_since(self, first: DocumentLosses) -> tuple[float, float | None] | None:
        """The change of the mean loss per token since `first` and its paired standard error, in nats.

        None where `first` read other documents, or other parts of them.
        """
        same = numpy.array_equal(self.documents, first.documents) and numpy.array_equal(self.tokens, first.tokens)
        if not same or not self.tokens.sum():
            return None
        difference = self.losses - first.losses
        return float(difference.sum() / self.tokens.sum()), _ratio_error(difference, self.tokens)


def _ratio_error(sums: NDArray[Any], tokens: NDArray[Any]) -> float | None:
    """Standard error of sum(sums) / sum(tokens) over independent documents."""
    read = tokens > 0
    sums, tokens, total = sums[read], tokens[read], float(tokens.sum())
    count = len(sums)
    if count < 2:
        return None
    residuals = sums - sums.sum() / total * tokens
    return math.sqrt(count / (count - 1) * float((residuals**2).sum())) / total


def documents_of_samples(dataset: Any, num_samples: int) -> NDArray[Any]:
    """The documents that the first samples of a dataset (megatron-core's GPTDataset) read: int64[n], ascending."""
    parts = []
    for at in dataset.shuffle_index[:num_samples]:
        first, last = dataset.sample_index[at][0], dataset.sample_index[at + 1][0]
        parts.append(dataset.document_index[first : last + 1])
    found: NDArray[Any] = numpy.unique(numpy.concatenate(parts)).astype(numpy.int64)
    return found


def documents_of_labels(dataset: Any, index: int) -> NDArray[Any]:
    """The document that each label of a sample belongs to.

    Args:
        dataset: megatron-core's GPTDataset, of one pass over its documents.
        index: the sample.

    Returns:
        int64[seq_length], numbers of the documents in the split.
    """
    at = dataset.shuffle_index[index]
    (first, offset), (last, end) = dataset.sample_index[at], dataset.sample_index[at + 1]
    documents = dataset.document_index[first : last + 1].astype(numpy.int64)
    lengths = dataset.dataset.sequence_lengths[documents].astype(numpy.int64)
    lengths[-1] = end + 1  # one token more than the sample's length: the last label
    lengths[0] -= offset
    labels: NDArray[Any] = numpy.repeat(documents, lengths)[1:]
    return labels


def save_first(path: Path, step: int, domains: dict[str, DocumentLosses]) -> None:
    """Keep the first validation of a run, which later ones are compared with (also after a resume)."""
    content = io.BytesIO()
    arrays = {
        f"{name}/{kind}": getattr(losses, kind)
        for name, losses in domains.items()
        for kind in ("documents", "losses", "tokens")
    }
    numpy.savez_compressed(content, step=numpy.int64(step), **arrays)
    write_atomic(path, content.getvalue())


def load_first(path: Path) -> tuple[int, dict[str, DocumentLosses]] | None:
    """Step and losses of the run's first validation; None where there is no such file, or one that cannot be read."""
    try:
        with numpy.load(path) as stored:
            names = sorted({key.rpartition("/")[0] for key in stored.files if "/" in key})
            domains = {
                name: DocumentLosses(*(stored[f"{name}/{kind}"] for kind in ("documents", "losses", "tokens")))
                for name in names
            }
            return int(stored["step"]), domains
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile):
        return None
