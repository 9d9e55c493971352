"""The Megatron datasets of a run: end-of-document tokens stay in the loss, cached sample indices are checked."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core.datasets import blended_megatron_dataset_builder
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from common.errors import UserError
from data.ledger import Corpus
from data.sample_index import check_blend, check_indices, replace_if_wrong

log = logging.getLogger("launch")

DOCUMENT_STARTS = "document_starts"  # of a sample, with data.isolate_documents


class WholeMaskGPTDataset(GPTDataset):
    """GPTDataset whose end-of-document tokens stay in the loss.

    Megatron-Core 0.12 to 0.14 treats every `label == tokenizer.pad` as padding: it zeroes the cached loss mask in
    place, so that all later samples are masked there too, and rewrites the tokens to id 0. With Qwen's tokenizers the
    padding token is the end-of-document token. Prepared corpora contain no padding, so the padding id is set to -1,
    which no token has. Upstream: Megatron-LM issues 1269 and 1711, fixed in 0.15. Test: tests/training/test_gates.py,
    which fails on the stock class.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pad_token_id = -1

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, ...]:
        """Read the cached sample indices, or build them; rank 0 checks them first, and builds wrong ones again.

        The other ranks read them after that, which Megatron's builder sees to with a barrier.
        """
        build: Callable[[], tuple[Any, ...]] = super()._build_document_sample_shuffle_indices
        if current_rank() > 0:
            return build()

        def check(documents: Any, samples: Any, order: Any) -> str:
            split = {"corpus": self.indices, "lengths": self.dataset.sequence_lengths}
            return check_indices(documents, samples, order, **split, seq_length=self.config.sequence_length)

        return _read_checked(self, build, check)


class IsolatedGPTDataset(WholeMaskGPTDataset):
    """WholeMaskGPTDataset whose samples say where their documents start, for `data.isolate_documents`."""

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        """As GPTDataset's, and document_starts: bool[seq]; position_ids start at 0 there."""
        sample: dict[str, torch.Tensor] = super().__getitem__(index)
        return {**sample, DOCUMENT_STARTS: sample["position_ids"] == 0}


class CheckedBlend(BlendedDataset):
    """BlendedDataset whose cached indices are checked before they are used, as those of WholeMaskGPTDataset are."""

    def _build_indices(self) -> tuple[Any, ...]:
        build: Callable[[], tuple[Any, ...]] = super()._build_indices
        if current_rank() > 0:
            return build()

        def check(datasets: Any, samples: Any) -> str:
            return check_blend(datasets, samples, len(self.datasets))

        return _read_checked(self, build, check)


def check_blended_indices() -> None:
    """Let Megatron's builder, which has no option for it, blend with `CheckedBlend`."""
    blended_megatron_dataset_builder.BlendedDataset = CheckedBlend


def _read_checked(dataset: Any, build: Callable[[], tuple[Any, ...]], check: Callable[..., str]) -> tuple[Any, ...]:
    """`replace_if_wrong` for a Megatron dataset, whose cache files begin with the hash of its description."""
    cache = dataset.config.path_to_cache
    pattern = f"{dataset.unique_description_hash}-*_index.npy"
    arrays, deleted = replace_if_wrong(Path(cache) if cache else None, pattern, build, check)
    for path, problem in deleted.items():
        log.warning("data: the sample index %s was damaged and is built again: %s", path, problem)
    return arrays


def build_windows(
    corpus: Corpus, num_samples: int | None, dataset_cls: type[GPTDataset], config: GPTDatasetConfig
) -> GPTDataset:
    """The training samples of a corpus in Megatron's shuffled order; `num_samples` None: one reading of it."""
    prefix = str(Path(corpus.folder) / "train")
    indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
    documents = numpy.arange(len(indexed), dtype=numpy.int32)
    return BlendedMegatronDatasetBuilder.build_generic_dataset(
        dataset_cls, lambda: True, True, *(indexed, prefix, documents, num_samples, Split.train, config)
    )


def isolating_class(dataset_cls: type[GPTDataset]) -> type[GPTDataset]:
    """The dataset class for `data.isolate_documents`."""
    if dataset_cls is WholeMaskGPTDataset:
        return IsolatedGPTDataset
    if not issubclass(dataset_cls, IsolatedGPTDataset):
        raise UserError(
            "this dataset class does not say where documents start",
            expected="data.datasets.IsolatedGPTDataset, or a class that extends it, with data.isolate_documents=True",
            found=f"data.dataset_cls={dataset_cls.__module__}.{dataset_cls.__qualname__}",
            do="leave data.dataset_cls out of the recipe, or data.isolate_documents=False",
        )
    return dataset_cls


def current_rank() -> int:
    """This process's rank; 0 where there is one process."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
