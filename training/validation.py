"""Validates each domain on the same samples every time: at step 0, at an interval and at the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from common.run_status import VALIDATING
from data.module import data_step
from training import heartbeat
from training.checkpoints import StepCheckpoint
from training.global_totals import num_model_chunks
from training.progress import VALIDATION_TIME, Progress

log = logging.getLogger("launch")


class DomainValidation(pl.Callback):
    """Measures loss (nats per token), perplexity and bits per byte of each domain.

    NeMo's own validation takes new samples each time from one mixed loader, so that its numbers cannot be compared with
    each other. Lightning does not allow several loaders with Megatron's iterator step.

    Args:
        every_n_steps: the interval. Step 0 and the last step are always validated.
        batches: global batches to read of each domain, or fewer where its split is smaller.
    """

    def __init__(self, every_n_steps: int, batches: int) -> None:
        self.every_n_steps, self.batches = every_n_steps, batches
        self._micro_batches: dict[str, list[dict[str, torch.Tensor]]] = {}
        self._last_step = -1

    @classmethod
    def replace_lightning_loop(cls, trainer: pl.Trainer) -> DomainValidation:
        """Take `trainer.val_check_interval` and `trainer.limit_val_batches`, and switch Lightning's own loop off."""
        validation = cls(int(trainer.val_check_interval), int(trainer.limit_val_batches))
        trainer.limit_val_batches = 0
        return validation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.batches and trainer.global_step == 0:
            self._validate(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == trainer.max_steps
        if self.batches and due and step != self._last_step:
            self._validate(trainer, pl_module)

    def _validate(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        heartbeat.enter_phase(VALIDATING)
        for progress in (c for c in trainer.callbacks if isinstance(c, Progress)):
            progress.write_pending_line(trainer)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the time of training steps that still compute is not validation's
        start, data = time.perf_counter(), trainer.datamodule
        if not self._micro_batches:
            self._micro_batches = {
                name: load_micro_batches(data, dataset, self.batches)
                for name, dataset in data.validation_sets().items()
            }
        self._last_step = trainer.global_step
        if not self._micro_batches:  # paths to .bin files, without the manifest that names their domains
            return
        model = trainer.strategy.model
        model.eval()
        losses = {name: mean_loss(model, batches, data) for name, batches in self._micro_batches.items()}
        model.train()
        rows = {name: _measures(loss, data.domains[name]) for name, loss in losses.items()}
        for checkpoint in (c for c in trainer.callbacks if isinstance(c, StepCheckpoint)):
            checkpoint.domain_losses = (trainer.global_step, losses)
        if trainer.is_global_zero:
            self._report(trainer, rows)
        VALIDATION_TIME.seconds += time.perf_counter() - start

    def _report(self, trainer: pl.Trainer, rows: dict[str, dict[str, float]]) -> None:
        """Write the measures of each domain to the log, to the loggers (TensorBoard) and to metrics.jsonl."""
        step, mean = trainer.global_step, sum(row["loss"] for row in rows.values()) / len(rows)
        for name, row in rows.items():
            log.info(
                "step %d/%d | val %s | loss %.4f | ppl %.2f | %.3f bits/byte",
                *(step, trainer.max_steps, name, row["loss"], row["perplexity"], row["bits_per_byte"]),
            )
            for logger in trainer.loggers:
                logger.log_metrics({f"val_{name}/{key}": value for key, value in row.items()}, step=step)
        for progress in (c for c in trainer.callbacks if isinstance(c, Progress)):
            progress.append_metrics({"step": step, "time": time.time(), "val_loss": mean, "validation": rows})


def _measures(loss: float, manifest: Any) -> dict[str, float]:
    """Loss, perplexity and bits per byte from a loss in nats per token (end-of-document tokens included)."""
    split = manifest.splits["validation"]
    bits = loss / math.log(2) * split.tokens / max(1, split.text_bytes)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "bits_per_byte": bits}


def load_micro_batches(data: Any, dataset: Any, batches: int) -> list[dict[str, torch.Tensor]]:
    """Load this rank's share of the first `batches` global batches of `dataset` as micro batches."""
    rank, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    size = data.micro_batch_size * replicas
    wanted = min(batches * data.global_batch_size, len(dataset)) // size * size or size
    own = [i % len(dataset) for i in range(wanted) if i // data.micro_batch_size % replicas == rank]
    chunks = [own[i : i + data.micro_batch_size] for i in range(0, len(own), data.micro_batch_size)]
    return [torch.utils.data.default_collate([dataset[i] for i in chunk]) for chunk in chunks]


def mean_loss(model: Any, batches: list[dict[str, torch.Tensor]], data: Any) -> float:
    """Mean loss per token (nats) over `batches` and all ranks, through Megatron's own forward schedule."""
    chunks = num_model_chunks()
    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches) for _ in range(chunks)] if chunks > 1 else iter(batches),
            model=model.pipeline,
            num_microbatches=len(batches),
            seq_length=data.seq_length,
            micro_batch_size=data.micro_batch_size,
            forward_only=True,
        )
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for output in outputs:  # empty on all but the last pipeline stage
        total += output["sums"]
    torch.distributed.all_reduce(total)  # tensor-parallel ranks count the same tokens equally often
    return float(total[0] / total[1])


def _forward_step(batches: Iterator[Any], model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    batch: dict[str, Any] = data_step(batches)
    out = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["labels"],
    )

    def sums(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"].double()
        return losses.mean(), {"sums": torch.stack([(losses.double() * mask).sum(), mask.sum()])}

    return out, sums
