"""Progress of a run: log lines and a bar for people, metrics.jsonl for programs."""

# NeMo-Run reads the constructor's types: no `from __future__ import annotations`, `Optional` instead of `X | None`

import contextlib
import logging
import sys
import time
from typing import Any, Optional

import lightning.pytorch as pl
import psutil
import torch

from common.json_files import append_json_line
from common.quantities import format_duration
from common.run_status import seconds_to_go
from common.rundir import RunDir
from data.module import TRAINING_TOKENS
from training import heartbeat
from training.async_read import AsyncRead
from training.global_totals import count_parameters, num_model_chunks, sum_over_replicas

log = logging.getLogger("launch")


class Stopwatch:
    """Adds up seconds until they are taken."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> float:
        """Return the seconds and start again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


VALIDATION_TIME = Stopwatch()  # since the last step line; validation is not part of a step


class Progress(pl.Callback):
    """Logs loss, learning rate, tokens per second and remaining time every `trainer.log_every_n_steps` steps.

    Numbers are read from the device only in these steps, and one step later where the device has not computed them
    yet: logging never makes the host or the GPU wait.

    Writes one JSON object per line to runs/NAME/metrics.jsonl: step, loss (nats per token), lr, grad_norm,
    global_batch_size, step_seconds, tokens_per_second (of all ranks), unmasked_tokens and consumed_tokens (that carried
    loss since the run began; by domain), consumed_samples, memory_gib (of this rank: the peak that torch has reserved
    on its GPU, or the resident memory of the process on a CPU) and time (unix seconds).

    Args:
        run_dir: the run directory runs/NAME. The launcher sets it. Without it there is no metrics.jsonl.
    """

    def __init__(self, run_dir: Optional[str] = None) -> None:
        self.run = RunDir.at(run_dir) if run_dir else None
        self._last_line: tuple[int, float, int] = (0, 0.0, 0)  # step, time, tokens
        self._pending: AsyncRead | None = None  # the numbers of the next line
        self._tokens_before: dict[str, Any] = {"unmasked": 0, "by_domain": {}}  # of all ranks, when this process began
        self._lr = 0.0
        self._num_domains = 1
        self._bar: Any = None
        self._task: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self._tokens_since_start(self._count_tokens().tolist())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tokens_before = {"unmasked": state["unmasked"], "by_domain": dict(state["by_domain"])}

    def _count_tokens(self) -> torch.Tensor:
        """int64[1 + domains]: tokens that carried loss on all ranks since this process began: all, then per domain.

        To be called on all ranks.
        """
        own = [TRAINING_TOKENS.unmasked, *(TRAINING_TOKENS.by_domain.get(i, 0) for i in range(self._num_domains))]
        return sum_over_replicas([count // num_model_chunks() for count in own])

    def _tokens_since_start(self, counts: list[int]) -> dict[str, Any]:
        """What `_count_tokens` counted, with the tokens of earlier attempts at this run added."""
        before, (unmasked, *by_domain) = self._tokens_before["by_domain"], counts
        return {
            "unmasked": self._tokens_before["unmasked"] + unmasked,
            "by_domain": {i: before.get(i, 0) + n for i, n in enumerate(by_domain) if before.get(i, 0) + n},
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_domains = max(1, len(trainer.datamodule.trained_domains))
        parameters = count_parameters(trainer.strategy.model)
        if trainer.is_global_zero:
            own = sum(p.numel() for p in trainer.strategy.model.parameters())
            log.info("model: %s parameters (%.1fM), %s on this rank", f"{parameters:,}", parameters / 1e6, f"{own:,}")
            self._start_bar(trainer)
        VALIDATION_TIME.take()
        self._last_line = (trainer.global_step, time.perf_counter(), self.state_dict()["unmasked"])

    def _start_bar(self, trainer: pl.Trainer) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (
            "training",
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TextColumn("ETA {task.fields[eta]}"),
        )
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(
            "train", total=trainer.max_steps, completed=trainer.global_step, now="", eta="-"
        )
        self._bar.start()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]  # at the end of the step it is the next step's

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self._bar:
            self._bar.update(self._task, completed=step)
        self.write_pending_line(trainer)
        if step % trainer.log_every_n_steps and step != trainer.max_steps:
            return
        metrics = trainer.callback_metrics
        numbers = {name: metrics[name] for name in ("reduced_train_loss", "grad_norm") if name in metrics}
        self._pending = AsyncRead({"step": step, "lr": self._lr, "tokens": self._count_tokens(), **numbers})
        if self._pending.ready or step == trainer.max_steps:
            self.write_pending_line(trainer)

    def write_pending_line(self, trainer: pl.Trainer) -> None:
        """Write the line whose numbers are on their way, if there is one. Waits for the numbers."""
        if self._pending is None:
            return
        numbers, self._pending = self._pending.read(), None
        row = self._row(trainer, numbers)
        if trainer.is_global_zero:
            self._log(trainer, row)
            self.append_metrics(row)

    def _row(self, trainer: pl.Trainer, numbers: dict[str, Any]) -> dict[str, Any]:
        last_step, last_time, last_tokens = self._last_line
        step, count = numbers["step"], self._tokens_since_start(numbers["tokens"])
        now, tokens = time.perf_counter(), count["unmasked"]
        self._last_line = (step, now, tokens)
        seconds = now - last_time - VALIDATION_TIME.take()
        data = trainer.datamodule
        return {
            "step": step,
            "loss": numbers["reduced_train_loss"],
            "lr": numbers["lr"],
            "grad_norm": numbers.get("grad_norm"),
            "global_batch_size": data.global_batch_size,
            "step_seconds": seconds / max(1, step - last_step),
            "tokens_per_second": (tokens - last_tokens) / seconds,
            "unmasked_tokens": tokens,
            "consumed_tokens": {data.trained_domains[i]: n for i, n in sorted(count["by_domain"].items())},
            "consumed_samples": step * data.global_batch_size,
            "memory_gib": memory_gib(trainer.strategy.root_device),
            "time": time.time(),
        }

    def _log(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        """Log a line that fits 100 columns with the date and the level before it."""
        speed = f"{short_count(row['tokens_per_second'])} tokens/s"
        steps = trainer.max_steps - row["step"]
        eta = format_duration(seconds_to_go(steps, row["step_seconds"], max_time_left_s(trainer)), compact=True)
        counter = f"step {row['step']}/{trainer.max_steps}"
        log.info("%s | loss %.4f | lr %.2e | %s | ETA %s", counter, row["loss"], row["lr"], speed, eta)
        if self._bar:
            self._bar.update(self._task, now=f"loss {row['loss']:.3f}  {speed}", eta=eta)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to the run's metrics.jsonl."""
        heartbeat.record_metrics(row)
        if self.run is not None:
            append_json_line(self.run.metrics, row)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.write_pending_line(trainer)
        if self._bar:
            self._bar.stop()
        device = trainer.strategy.root_device
        if trainer.is_global_zero and device.type == "cuda":
            log.info("peak GPU memory: %.2f GiB", memory_gib(device))

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the device itself may be what failed
            if self._pending is not None and self._pending.ready:
                self.write_pending_line(trainer)
        if self._bar:
            self._bar.stop()


def max_time_left_s(trainer: pl.Trainer) -> float | None:
    """Seconds until `trainer.max_time` ends the training; None without it."""
    timer = next((one for one in trainer.callbacks if isinstance(one, pl.callbacks.Timer)), None)
    return timer.time_remaining() if timer is not None else None


def memory_gib(device: torch.device) -> float:
    """Memory of this rank in GiB: the peak that torch has reserved on its GPU, or the resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return float(psutil.Process().memory_info().rss / 2**30)


def short_count(count: float) -> str:
    """A number in at most 6 characters: 8,123 or 269.1k or 1.23M."""
    if count < 100_000:
        return f"{count:,.0f}"
    return f"{count / 1e3:.1f}k" if count < 999_950 else f"{count / 1e6:.2f}M"
