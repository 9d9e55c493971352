"""Validates each domain on the same samples every time: at step 0, at an interval and at the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from nemo.collections.llm.gpt.model.base import get_batch_on_this_context_parallel_rank

from common.domain_losses import STANDARD_ERRORS
from common.run_status import VALIDATING
from common.rundir import RunDir
from data.module import data_step
from training import hang_watch, heartbeat
from training.checkpoints import StepCheckpoint
from training.document_losses import (
    DocumentLosses,
    documents_of_labels,
    documents_of_samples,
    load_first,
    save_first,
)
from training.documents import packing_arguments, schedule_shape
from training.fast.gathers import finish_gathers
from training.follow_budget import follow_budget
from training.global_totals import num_model_chunks
from training.progress import VALIDATION_TIME, Progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("launch")
Found = dict[str, tuple[float, DocumentLosses]]  # domain -> loss (nats per token), and its sums by document


@dataclass(frozen=True)
class ValidationSamples:
    """The samples of one domain that every validation reads.

    Args:
        batches: this rank's micro batches; beside the dataset's fields, `documents: int64[mbs, seq]` says for each
            label at which place of `documents` its document stands.
        documents: int64[n], numbers of the documents that all ranks read together, ascending.
    """

    batches: list[dict[str, torch.Tensor]]
    documents: NDArray[Any]


class DomainValidation(pl.Callback):
    """Measures loss (nats per token), perplexity and bits per byte of each domain, with the error of the loss.

    The losses are also summed by document. They give the loss its standard error, and the change since the first
    validation a paired one (training/document_losses.py); the first one's sums are kept in first-validation.npz.

    NeMo's own validation takes new samples each time from one mixed loader, so that its numbers cannot be compared with
    each other. Lightning does not allow several loaders with Megatron's iterator step.

    Args:
        every_n_steps: the interval. Step 0 and the last step are always validated.
        batches: global batches to read of each domain, or fewer where its split is smaller.
    """

    def __init__(self, every_n_steps: int, batches: int) -> None:
        self.every_n_steps, self.batches = every_n_steps, batches
        self._samples: dict[str, ValidationSamples] = {}
        self._first: tuple[int, dict[str, DocumentLosses]] | None = None  # step and losses of the first validation
        self._last_step = -1
        self.only_when_asked = False  # another callback calls `measure`

    @classmethod
    def replace_lightning_loop(cls, trainer: pl.Trainer) -> DomainValidation:
        """Take `trainer.val_check_interval` and `trainer.limit_val_batches`, and switch Lightning's own loop off."""
        validation = cls(int(trainer.val_check_interval), int(trainer.limit_val_batches))
        trainer.limit_val_batches = 0
        return validation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.batches and trainer.global_step == 0 and not self.only_when_asked:
            self._validate(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == trainer.max_steps
        if self.batches and due and step != self._last_step:
            self._validate(trainer, pl_module)

    def _validate(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        heartbeat.enter_phase(VALIDATING)
        hang_watch.end_step()  # this may take far longer than a step
        for progress in (c for c in trainer.callbacks if isinstance(c, Progress)):
            progress.write_pending_line(trainer)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the time of training steps that still compute is not validation's
        start, data = time.perf_counter(), trainer.datamodule
        self._last_step = trainer.global_step
        found = self.measure(trainer)
        if not found:
            return
        losses = {name: loss for name, (loss, _) in found.items()}
        run: RunDir | None = next((c.run for c in trainer.callbacks if isinstance(c, Progress)), None)
        share = follow_budget(trainer, losses, run, self.every_n_steps)
        for checkpoint in (c for c in trainer.callbacks if isinstance(c, StepCheckpoint)):
            checkpoint.domain_losses = (trainer.global_step, losses)
        if trainer.is_global_zero:
            by_document = {name: documents for name, (_, documents) in found.items()}
            first_step, first = self._first_validation(trainer, run, by_document)
            rows = {
                name: domain_row(loss, by_document[name], data.domains[name], first.get(name), first_step)
                for name, loss in losses.items()
            }
            self._report(trainer, rows, time.perf_counter() - start, share)
        VALIDATION_TIME.seconds += time.perf_counter() - start

    def measure(self, trainer: pl.Trainer) -> Found:
        """Measure every domain with the weights as they are. To be called on all ranks.

        Nothing is measured where the data are paths to .bin files, without the manifest that names their domains.
        """
        data, model = trainer.datamodule, trainer.strategy.model
        if not self._samples:
            self._samples = {
                name: load_samples(data, dataset, self.batches) for name, dataset in data.validation_sets().items()
            }
        model.eval()
        found = {name: measure_losses(model, samples, data) for name, samples in self._samples.items()}
        model.train()
        return found

    def _first_validation(
        self, trainer: pl.Trainer, run: RunDir | None, now: dict[str, DocumentLosses]
    ) -> tuple[int, dict[str, DocumentLosses]]:
        """Step and losses of the run's first validation, which is this one if none was kept before."""
        if self._first is None and run is not None and trainer.global_step > 0:
            self._first = load_first(run.first_validation)
        if self._first is None:
            self._first = (trainer.global_step, now)
            if run is not None:
                save_first(run.first_validation, *self._first)
        return self._first

    def _report(self, trainer: pl.Trainer, rows: dict[str, dict[str, Any]], seconds: float, share: Any) -> None:
        """Write the measures of each domain to the log, to the loggers (TensorBoard) and to metrics.jsonl."""
        step, mean = trainer.global_step, sum(row["loss"] for row in rows.values()) / len(rows)
        for name, row in rows.items():
            log.info("step %d/%d | val %s | %s", step, trainer.max_steps, name, _format_measures(row))
            numbers = {f"val_{name}/{key}": value for key, value in row.items() if value is not None}
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=step)
        for progress in (c for c in trainer.callbacks if isinstance(c, Progress)):
            row = {"step": step, "time": time.time(), "seconds": seconds, "val_loss": mean, "validation": rows}
            row |= {} if share is None else {"forgetting_budget": share}
            progress.append_metrics(row)


def _format_measures(row: dict[str, Any]) -> str:
    """The measures of a domain in a line; two standard errors stand behind the loss."""
    error = row["standard_error"]
    loss = f"loss {row['loss']:.4f}" + ("" if error is None else f" ± {STANDARD_ERRORS * error:.4f}")
    ppl, bits = f"ppl {row['perplexity']:.2f}", f"{row['bits_per_byte']:.3f} bits/byte"
    return f"{loss} | {ppl} | {bits} | {row['tokens']:,} tokens"


def domain_row(
    loss: float, now: DocumentLosses, manifest: Any, first: DocumentLosses | None, first_step: int
) -> dict[str, Any]:
    """What metrics.jsonl holds of one validation of a domain; common/domain_losses.py says what each number is."""
    return {**_measures(loss, manifest), **_errors(now, first, first_step)}


def _measures(loss: float, manifest: Any) -> dict[str, Any]:
    """Loss, perplexity and bits per byte from a loss in nats per token (end-of-document tokens included)."""
    split = manifest.splits["validation"]
    bits = loss / math.log(2) * split.tokens / max(1, split.text_bytes)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


def _errors(now: DocumentLosses, first: DocumentLosses | None, first_step: int) -> dict[str, Any]:
    """What a row holds beside the measures."""
    row: dict[str, Any] = {
        "tokens": round(float(now.tokens.sum())),
        "documents": int((now.tokens > 0).sum()),
        "standard_error": now.standard_error(),
    }
    if first is not None and (change := now.change_since(first)) is not None:
        row |= {"change": change[0], "change_standard_error": change[1], "change_since": first_step}
    return row


def load_samples(data: Any, dataset: Any, batches: int) -> ValidationSamples:
    """Load this rank's share of the first `batches` global batches of `dataset` as micro batches."""
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    size = data.micro_batch_size * replicas
    wanted = min(batches * data.global_batch_size, len(dataset)) // size * size or size
    own = [i % len(dataset) for i in range(wanted) if i // data.micro_batch_size % replicas == rank]
    chunks = [own[i : i + data.micro_batch_size] for i in range(0, len(own), data.micro_batch_size)]
    documents = documents_of_samples(dataset, min(wanted, len(dataset)))

    def load(index: int) -> dict[str, Any]:
        hang_watch.note_progress()
        places = numpy.searchsorted(documents, documents_of_labels(dataset, index))
        return {**dataset[index], "documents": torch.from_numpy(places)}

    collate = torch.utils.data.default_collate
    return ValidationSamples([collate([load(i) for i in chunk]) for chunk in chunks], documents)


def measure_losses(model: Any, samples: ValidationSamples, data: Any) -> tuple[float, DocumentLosses]:
    """Mean loss per token (nats) over `samples` and all ranks, and the sums by document."""
    device = torch.cuda.current_device()
    by_document = torch.zeros(2, len(samples.documents), dtype=torch.float64, device=device)
    loss = mean_loss(model, samples.batches, data, by_document)
    torch.distributed.all_reduce(by_document)
    by_document /= parallel_state.get_tensor_model_parallel_world_size()  # its ranks count the same tokens
    losses, tokens = by_document.cpu().numpy()
    return loss, DocumentLosses(samples.documents, losses, tokens)


def mean_loss(
    model: Any, batches: list[dict[str, torch.Tensor]], data: Any, by_document: torch.Tensor | None = None
) -> float:
    """Mean loss per token (nats) over `batches` and all ranks, through Megatron's own forward schedule.

    Args:
        by_document: float64[2, documents]; this rank's losses and tokens are added at the places that the batches name.
    """

    def add_up(losses: torch.Tensor, batch: dict[str, Any], item: dict[str, Any]) -> torch.Tensor:
        mask = batch["loss_mask"].double()
        masked = losses.double() * mask
        if by_document is not None:  # split over the context-parallel ranks as the batch is
            part = {"documents": item["documents"].to(losses.device)}
            places = get_batch_on_this_context_parallel_rank(part)["documents"].flatten()
            by_document[0].index_add_(0, places, masked.flatten())
            by_document[1].index_add_(0, places, mask.flatten())
        return torch.stack([masked.sum(), mask.sum()])

    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for sums in forward_losses(model, batches, data, add_up):
        total += sums
    torch.distributed.all_reduce(total)  # tensor-parallel ranks count the same tokens equally often
    return float(total[0] / total[1])


def forward_losses(
    model: Any,
    batches: list[dict[str, torch.Tensor]],
    data: Any,
    measure: Callable[[torch.Tensor, dict[str, Any], dict[str, Any]], torch.Tensor],
) -> list[torch.Tensor]:
    """A forward pass over `batches`, through Megatron's own schedule.

    Args:
        measure: called with the losses of a micro batch, fp32[mbs, seq] ([1, mbs * seq] if documents are isolated), the
            batch on the device, and the one in `batches`.

    Returns:
        what `measure` returned for each batch; empty on all but the last pipeline stage.
    """

    def forward_step(iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        hang_watch.note_progress()
        item = next(iterator)
        batch: dict[str, Any] = data_step(iter([item]))
        out = model(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
            **packing_arguments(batch, data.seq_length),
        )
        return out, lambda losses: (losses.mean(), {"measured": measure(losses, batch, item)})

    finish_gathers(model)
    chunks = num_model_chunks()
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in range(chunks)] if chunks > 1 else iter(batches),
            model=model.pipeline,
            num_microbatches=len(batches),
            forward_only=True,
            **schedule_shape(data),
        )
    return [output["measured"] for output in outputs]
