"""NeMo's PreTrainingDataModule over prepared corpora, with the loss mask kept intact."""

# NeMo-Run reads the constructor's types to parse overrides: no `from __future__ import annotations`, no `X | Y`

import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
from nemo.collections.llm.gpt.model.base import HAVE_TE, gpt_data_step

from common.errors import UserError
from data.budget import BudgetState, make_budget
from data.continue_ledger import make_corpora, make_ledger, with_layouts
from data.datasets import (
    DOCUMENT_STARTS,
    WholeMaskGPTDataset,
    build_windows,
    check_blended_indices,
    current_rank,
    isolating_class,
)
from data.ledger import Corpus, Ledger, stage_entries
from data.manifest import SPLITS, Manifest, load_manifest
from data.ordered_dataset import OrderedDataset
from data.resolve_blend import domain_folders, load_run_blend, resolve_run_blend
from data.sample_index import ROWS

log = logging.getLogger("launch")

CU_SEQLENS = "cu_seqlens"  # of a micro batch whose documents are isolated: what Transformer Engine calls their borders
_TOGETHER = "attend to each other, as in Qwen's pretraining (data.isolate_documents=False)"
_ISOLATED = "are isolated: each attends only to itself, from position 0 (data.isolate_documents=True)"
_LEAST_DOCUMENTS = 32  # cuDNN's attention gets at least as many, and powers of two above (Transformer Engine 2.12)


@dataclass(frozen=True)
class _Corpora:
    """The corpora behind `data.paths` or `data.blend`.

    Args:
        paths: split -> [weight, prefix, ...], as NeMo takes them.
        folders: name -> prepared folder of every domain that is trained on or validated.
        trained: names of the domains that are trained on, in the order of the train prefixes.
    """

    paths: dict[str, list[str]]
    folders: dict[str, str]
    trained: list[str]


def _find_corpora(
    paths: Union[dict[str, list[str]], str, None],
    blend: Union[dict[str, Any], str, None],
    replay_share: Optional[float],
    domains: Optional[dict[str, str]],
) -> _Corpora:
    if blend is not None and paths is not None:
        raise UserError(
            "two descriptions of the training data",
            expected="data.paths or data.blend",
            found=f"data.paths={paths!r} and data.blend",
            do="data.blend=None data.paths=FOLDER, or leave data.paths out",
        )
    if blend is not None and load_run_blend(blend).stages:
        folders = domain_folders(blend)
        return _Corpora(_all_paths(folders), folders, [])
    if blend is not None:
        trained, folders = resolve_run_blend(blend, replay_share)
        return _Corpora(trained.paths, folders, [domain.name for domain in trained.domains])
    if isinstance(paths, dict):
        return _Corpora(paths, dict(domains or {}), list(domains or {}))
    if paths is not None:
        name = Path(paths).name
        return _Corpora({split: [str(Path(paths) / split)] for split in SPLITS}, {name: paths}, [name])
    raise UserError(
        "no training data",
        expected="data.paths or data.blend",
        found="neither",
        do="data.paths=FOLDER, a folder made by `launch.py data prepare`",
    )


def _all_paths(folders: dict[str, str]) -> dict[str, list[str]]:
    """For NeMo's constructor, which wants a blend: in a run with stages `OrderedDataset` draws the samples."""
    return {
        split: [
            word
            for folder in folders.values()
            if load_manifest(Path(folder)).splits[split].tokens
            for word in ("1.0", str(Path(folder) / split))
        ]
        for split in SPLITS
    }


def _own_tokenizer(corpora: _Corpora) -> AutoTokenizer:
    """The tokenizer that the first corpus contains.

    Raises:
        UserError: the data are prefixes, which contain none.
    """
    if not corpora.folders:
        raise UserError(
            "no tokenizer for the training data",
            expected="data.tokenizer beside a dict of prefixes (NeMo would silently take GPT-2's)",
            found="tokenizer=None",
            do="give data.paths a folder made by `launch.py data prepare`, or set data.tokenizer",
        )
    return AutoTokenizer(str(Path(next(iter(corpora.folders.values()))) / "tokenizer"), use_fast=True)


def _index_folder(corpora: _Corpora, manifests: dict[str, Manifest], chosen: Optional[str]) -> Optional[str]:
    """Where Megatron caches its sample indices: a folder named after the content of all corpora."""
    if not corpora.folders:
        return chosen
    contents = "".join(m.splits[split].bin_sha256 for m in manifests.values() for split in SPLITS)
    cache = Path(chosen or Path(next(iter(corpora.folders.values()))) / "index")
    return str(cache / hashlib.sha256(contents.encode()).hexdigest()[:16])


def _roles(blend: Union[dict[str, Any], str, None]) -> dict[str, str]:
    """The role of every domain of a blend."""
    return {} if blend is None else {domain.name: domain.role for domain in load_run_blend(blend).domains}


class PreparedDataModule(PreTrainingDataModule):
    """Train, validation and test data from folders written by `launch.py data prepare`.

    Args:
        paths: a prepared folder (its tokenizer and splits are used), or NeMo's own
            `{"train": [...], "validation": [...], "test": [...]}` of .bin/.idx prefixes with weights.
        tokenizer: needed only for a dict without domains; a folder has its own. Never falls back to GPT-2's.
        blend: instead of paths, a description as in data/blend.py, or the path of its YAML file.
        replay_share: replaces the blend's own; 0 trains on the new domains only and still validates all.
        domains: for a dict of paths, name -> prepared folder, in the order of the train prefixes.
        index_mapping_dir: where Megatron caches its sample indices, in a folder named after the corpora's content, so
            that no cache of an earlier preparation is read; default: beside the first corpus.
        train_steps: plan the sample order for this many steps, if more than trainer.max_steps. A run that will be
            extended beyond the end of an epoch keeps its order only if this is set from the start (Megatron shuffles
            all epochs of a run together).
        isolate_documents: a document attends only to itself, its positions start at 0, and its first token, which
            would be predicted from the end of another document, is not in the loss (docs/documents.md). Includes
            `reset_position_ids`, `reset_attention_mask` and `eod_mask_loss`.
        stages: what the launcher has resolved of the blend's stages (launcher/stages.py).
        forgetting_budget: domain -> nats per token above its loss at step 0; the replay share follows the validation,
            so that these domains stay below (data/budget.py).
        replay_bounds: lowest and highest replay share that a forgetting budget may decide.
        ledger: the ledger.json of the checkpoint that the run continues from. The launcher sets it.
        attempt: the number of this attempt at the run. The launcher sets it.
        kwargs: as in NeMo's PreTrainingDataModule (`seq_length`, `micro_batch_size`, ...).

    Raises:
        UserError: the folder is not a prepared corpus, a dict without a tokenizer, or two descriptions of the data.
    """

    def __init__(
        self,
        paths: Union[dict[str, list[str]], str, None] = None,
        blend: Union[dict[str, Any], str, None] = None,
        replay_share: Optional[float] = None,
        seq_length: int = 2048,
        tokenizer: Optional[AutoTokenizer] = None,
        domains: Optional[dict[str, str]] = None,
        micro_batch_size: int = 1,
        global_batch_size: int = 1,
        num_workers: int = 2,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        seed: int = 1234,
        index_mapping_dir: Optional[str] = None,
        train_steps: Optional[int] = None,
        isolate_documents: bool = False,
        stages: Optional[list[dict[str, Any]]] = None,
        forgetting_budget: Optional[dict[str, float]] = None,
        replay_bounds: Optional[list[float]] = None,
        ledger: Optional[str] = None,
        attempt: int = 1,
        dataset_cls: type[GPTDataset] = WholeMaskGPTDataset,
    ) -> None:
        corpora = _find_corpora(paths, blend, replay_share, domains)
        self.trained_domains = corpora.trained
        self.domain_folders = corpora.folders
        self.domains = {name: load_manifest(Path(folder)) for name, folder in corpora.folders.items()}
        self.train_steps = train_steps
        self.isolate_documents = isolate_documents
        if isolate_documents:
            reset_position_ids, reset_attention_mask, eod_mask_loss = True, False, True
            dataset_cls = isolating_class(dataset_cls)
        super().__init__(
            paths=corpora.paths,
            seq_length=seq_length,
            tokenizer=tokenizer or _own_tokenizer(corpora),
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers and num_workers > 0,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
            seed=seed,
            split=None,
            index_mapping_dir=_index_folder(corpora, self.domains, index_mapping_dir),
            dataset_cls=dataset_cls,
        )
        self.budget = make_budget(forgetting_budget, replay_bounds)
        self.ledger: Optional[Ledger] = None  # with NeMo's own form of paths, nothing says which corpora there are
        if stages is not None:
            entries = stage_entries(stages)
            self.ledger = make_ledger(
                entries,
                make_corpora(corpora.folders, _roles(blend), entries, seq_length),
                saved=Path(ledger) if ledger is not None else None,
                has_budget=self.budget is not None,
                attempt=attempt,
                seed=seed,
                seq_length=seq_length,
                global_batch_size=global_batch_size,
            )
            if self.ledger.order == "ledger":
                self.trained_domains = [corpus.name for corpus in self.ledger.corpora]
        if not self.trained_domains and self.domain_folders:
            raise UserError(
                "a blend with stages without the steps of its stages",
                expected="data.stages, which launch.py sets",
                found="stages=None",
                do="python launch.py --recipe NAME data.blend=FILE.yaml",
            )
        # Without Transformer Engine, NeMo asks for a seq x seq mask per sample, which causal SDPA does not need.
        self.create_attention_mask = reset_attention_mask and not HAVE_TE

    def build(
        self,
        trainer_max_steps: int,
        trainer_val_check_interval: int,
        trainer_limit_val_batches: Union[int, float],
        trainer_limit_test_batches: Union[int, float],
    ) -> None:
        """Build the training samples. Lightning's validation and test get one sample each: see `validation_sets`."""
        check_blended_indices()
        if current_rank() == 0:
            log.info("data: the documents in a sequence %s", _ISOLATED if self.isolate_documents else _TOGETHER)
        if self.ledger is not None and self.ledger.order == "ledger":
            self._train_ds = OrderedDataset(
                self.ledger,
                self._build_windows,
                trainer_max_steps * self.global_batch_size,
                most_changes=trainer_max_steps // trainer_val_check_interval + 1 if self.budget is not None else 0,
            )
            self._validation_ds = self._test_ds = None
            return
        steps = max(trainer_max_steps, self.train_steps or 0)
        super().build(steps, steps, 1, 1)
        if self.ledger is not None:
            parts = getattr(self._train_ds, "datasets", [self._train_ds])
            layouts = [(part.num_samples, len(part)) for part in parts]
            self.ledger = with_layouts(self.ledger, dict(zip(self.trained_domains, layouts, strict=True)))

    def _build_windows(self, corpus: Corpus, num_samples: Optional[int]) -> GPTDataset:
        """The training samples of a corpus in Megatron's shuffled order; `num_samples` None: one reading of it."""
        return build_windows(corpus, num_samples, self.dataset_cls, self.gpt_dataset_config)

    def ledger_after(self, step: int) -> Optional[Ledger]:
        """The token ledger after `step` steps of the run; None where nothing says which corpora are read."""
        if self.ledger is None or self.ledger.order == "ledger":
            return self.ledger and self.ledger.at(step)
        samples, drawn = step * self.global_batch_size, numpy.zeros(len(self.trained_domains), dtype=numpy.int64)
        if not hasattr(self._train_ds, "dataset_index"):
            return self.ledger.at(step, {self.trained_domains[0]: samples})
        for start in range(0, samples, ROWS):  # memory-mapped: in bounded memory
            part = self._train_ds.dataset_index[start : min(samples, start + ROWS)]
            drawn += numpy.bincount(part, minlength=len(drawn))
        return self.ledger.at(step, dict(zip(self.trained_domains, drawn.tolist(), strict=True)))

    def change_replay_share(self, state: BudgetState) -> None:
        """Read another replay share from step `state.first` on. To be called on all ranks.

        Args:
            state: what the forgetting budget has decided; no sample of that step may have been asked for yet.
        """
        assert self.ledger is not None
        changed = self.ledger.with_share(state.share, state.first, state.decided)
        self.ledger = dataclasses.replace(changed, budget=state)
        self._train_ds.change_share(state.share, state.first, state.decided)

    def prefetched_steps(self, replicas: int) -> int:
        """Steps, rounded up, whose samples data workers have been asked for before a rank takes them.

        torch keeps `prefetch_factor` (2) micro batches per worker on their way.

        Args:
            replicas: data-parallel ranks.
        """
        num_workers: int = self.num_workers
        micro_batches: int = self.global_batch_size // (self.micro_batch_size * replicas)
        return math.ceil(2 * num_workers / micro_batches)

    def validation_sets(self) -> dict[str, GPTDataset]:
        """A dataset per domain with one pass over its validation split, in the same order every time."""
        config = self.gpt_dataset_config
        sets = {}
        for name, folder in self.domain_folders.items():
            prefix = str(Path(folder) / "validation")
            indexed = IndexedDataset(prefix, multimodal=False, mmap=True)
            documents = numpy.arange(len(indexed), dtype=numpy.int32)
            sets[name] = BlendedMegatronDatasetBuilder.build_generic_dataset(
                self.dataset_cls, lambda: True, True, indexed, prefix, documents, None, Split.valid, config
            )
        return sets


class TokenCount:
    """Counts the training tokens of this data-parallel rank that are in the loss, in total and by domain."""

    def __init__(self) -> None:
        self.unmasked = 0
        self.by_domain: dict[int, int] = {}

    def add(self, batch: dict[str, torch.Tensor]) -> None:
        """Count a micro batch: loss_mask float32[mbs, seq], and for a blend dataset_id int64[mbs]."""
        per_sample = batch["loss_mask"].count_nonzero(dim=1).tolist()
        self.unmasked += sum(per_sample)
        domains = batch["dataset_id"].tolist() if "dataset_id" in batch else [0] * len(per_sample)
        for domain, tokens in zip(domains, per_sample, strict=True):
            self.by_domain[domain] = self.by_domain.get(domain, 0) + tokens


TRAINING_TOKENS = TokenCount()


class ReadyBatch(dict[str, Optional[torch.Tensor]]):
    """A batch that `data_step` has already counted and moved to the GPU; it returns it unchanged."""


def data_step(dataloader_iter: Iterator[Any]) -> dict[str, torch.Tensor | None]:
    """NeMo's data step, which also counts the unmasked tokens of training batches while they are on the host.

    Args:
        dataloader_iter: yields (batch, batch_idx, dataloader_idx); batch holds tokens, labels: int64[mbs, seq],
            loss_mask: float32[mbs, seq], position_ids: int64[mbs, seq]; document_starts: bool[mbs, seq] if documents
            are isolated.

    Returns:
        the batch on the device, None for what this pipeline stage does not read. If documents are isolated, its
        tensors are [1, mbs * seq], and cu_seqlens: int32[documents + 1 or more] is the first token of each document.
    """
    item = next(dataloader_iter)
    batch = item[0] if isinstance(item, tuple) else item
    if isinstance(batch, ReadyBatch):
        return batch
    if torch.is_grad_enabled() and batch.get("loss_mask") is not None:
        TRAINING_TOKENS.add(batch)
    out: dict[str, torch.Tensor | None] = gpt_data_step(iter((item,)))
    out.setdefault("attention_mask", None)
    if DOCUMENT_STARTS in batch:
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            out[name] = None if (value := out[name]) is None else value.reshape(1, -1)
        del out[DOCUMENT_STARTS]
        out[CU_SEQLENS] = _find_borders(batch[DOCUMENT_STARTS]).cuda(non_blocking=True)
    return out


def _find_borders(starts: torch.Tensor) -> torch.Tensor:
    """The first token of each document in the row of all samples, then the number of tokens up to a fixed length.

    Equal lengths are what a CUDA graph needs: the number of documents is rounded up to a power of two. Attention skips
    the empty documents at the end.

    Args:
        starts: bool[mbs, seq] on the host; the first token of each sample is one.

    Returns:
        int32[documents, rounded up, + 1].
    """
    first = starts.flatten().nonzero().flatten()
    length = max(_LEAST_DOCUMENTS, 1 << (len(first) - 1).bit_length())
    borders = torch.full((length + 1,), starts.numel(), dtype=torch.int32, pin_memory=starts.is_pinned())
    borders[: len(first)] = first
    return borders
