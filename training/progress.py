"""What a person sees of a run (a bar) and what a machine reads (log lines, metrics.jsonl)."""

# NeMo-Run reads the constructor's types: no `from __future__ import annotations`, `Optional` instead of `X | None`

import contextlib
import json
import logging
import sys
import time
from typing import Any, Optional

import lightning.pytorch as pl
import torch

from common.rundir import RunDir
from data.module import TRAINING_TOKENS
from training import global_totals as whole
from training import heartbeat
from training.async_read import Later

log = logging.getLogger("launch")


class Pause:
    """Seconds spent in validation since the last log line: not part of a step."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


PAUSE = Pause()


class Progress(pl.Callback):
    """Loss, learning rate, step time, tokens/s and ETA, every `trainer.log_every_n_steps` steps.

    Values are read from the device only at that interval, and a step late where the device is not done with them:
    nothing waits for the GPU, and the GPU for nothing.
    Writes `runs/NAME/metrics.jsonl` (one JSON object a line: step, loss, lr, grad_norm, seconds a
    step, tokens/s of all ranks, unmasked tokens, consumed samples, unix time).

    Args:
        run_dir: the run directory runs/NAME. The launcher sets it. Without it there is no metrics.jsonl.
    """

    def __init__(self, run_dir: Optional[str] = None) -> None:
        self.run = RunDir.at(run_dir) if run_dir else None
        self._since: tuple[int, float, int] = (0, 0.0, 0)
        self._due: Later | None = None  # the next line
        self._before: dict[str, Any] = {"unmasked": 0, "by_domain": {}}  # of all ranks, when this process began
        self._lr = 0.0
        self._domains = 1
        self._bar: Any = None
        self._task: Any = None

    def state_dict(self) -> dict[str, Any]:
        return self._read_tokens(self._own_tokens().tolist())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = {"unmasked": state["unmasked"], "by_domain": dict(state["by_domain"])}

    def _own_tokens(self) -> torch.Tensor:
        """int64[1 + domains]: tokens of all ranks that carried loss, in all and by domain, since this process began.

        Called on all ranks.
        """
        own = [TRAINING_TOKENS.unmasked, *(TRAINING_TOKENS.by_domain.get(i, 0) for i in range(self._domains))]
        return whole.over_replicas([count // whole.chunks() for count in own])

    def _read_tokens(self, counts: list[int]) -> dict[str, Any]:
        """The same since the run began, from `_own_tokens`."""
        before, (unmasked, *by_domain) = self._before["by_domain"], counts
        return {
            "unmasked": self._before["unmasked"] + unmasked,
            "by_domain": {i: before.get(i, 0) + n for i, n in enumerate(by_domain) if before.get(i, 0) + n},
        }

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._domains = max(1, len(trainer.datamodule.trained_domains))
        parameters = whole.num_parameters(trainer.strategy.model)
        if trainer.is_global_zero:
            own = sum(p.numel() for p in trainer.strategy.model.parameters())
            log.info("model: %s parameters (%.1fM), %s on this rank", f"{parameters:,}", parameters / 1e6, f"{own:,}")
            self._start_bar(trainer)
        PAUSE.take()
        self._since = (trainer.global_step, time.perf_counter(), self.state_dict()["unmasked"])

    def _start_bar(self, trainer: pl.Trainer) -> None:
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            "training",
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
        )
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task("train", total=trainer.max_steps, completed=trainer.global_step, now="")
        self._bar.start()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]  # at the end of the step it is the next one's

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self._bar:
            self._bar.update(self._task, completed=step)
        self.tell(trainer)
        if step % trainer.log_every_n_steps and step != trainer.max_steps:
            return
        metrics = trainer.callback_metrics
        numbers = {name: metrics[name] for name in ("reduced_train_loss", "grad_norm") if name in metrics}
        self._due = Later({"step": step, "lr": self._lr, "tokens": self._own_tokens(), **numbers})
        if self._due.here or step == trainer.max_steps:
            self.tell(trainer)

    def tell(self, trainer: pl.Trainer) -> None:
        """Write the line that is due, if any; waits for its numbers."""
        if self._due is None:
            return
        numbers, self._due = self._due.read(), None
        row = self._row(trainer, numbers)
        if trainer.is_global_zero:
            self._write(trainer, row)

    def _row(self, trainer: pl.Trainer, numbers: dict[str, Any]) -> dict[str, Any]:
        then_step, then, then_tokens = self._since
        step, count = numbers["step"], self._read_tokens(numbers["tokens"])
        now, tokens = time.perf_counter(), count["unmasked"]
        self._since = (step, now, tokens)
        spent = now - then - PAUSE.take()
        data = trainer.datamodule
        return {
            "step": step,
            "loss": numbers["reduced_train_loss"],
            "lr": numbers["lr"],
            "grad_norm": numbers.get("grad_norm"),
            "global_batch_size": data.global_batch_size,
            "step_seconds": spent / max(1, step - then_step),
            "tokens_per_second": (tokens - then_tokens) / spent,
            "unmasked_tokens": tokens,
            "consumed_tokens": {data.trained_domains[i]: n for i, n in sorted(count["by_domain"].items())},
            "consumed_samples": step * data.global_batch_size,
            "time": time.time(),
        }

    def _write(self, trainer: pl.Trainer, row: dict[str, Any]) -> None:
        eta = (trainer.max_steps - row["step"]) * row["step_seconds"]
        log.info(
            "step %d/%d | loss %.4f | lr %.3e | global batch %d | %.3f s/step | %s tokens/s | consumed samples %d"
            " | unmasked tokens %d | ETA %s",
            row["step"],
            trainer.max_steps,
            row["loss"],
            row["lr"],
            row["global_batch_size"],
            row["step_seconds"],
            f"{row['tokens_per_second']:,.0f}",
            row["consumed_samples"],
            row["unmasked_tokens"],
            f"{int(eta // 60)}:{int(eta % 60):02d}",
        )
        self.append_metrics(row)
        if self._bar:
            self._bar.update(self._task, now=f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s")

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to the run's metrics.jsonl."""
        heartbeat.record_metrics(row)
        if self.run is not None:
            with self.run.metrics.open("a") as stream:
                stream.write(json.dumps(row) + "\n")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.tell(trainer)
        if self._bar:
            self._bar.stop()
        if trainer.is_global_zero and torch.cuda.is_available():
            log.info("peak GPU memory: %.2f GiB", torch.cuda.max_memory_reserved() / 2**30)

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the device itself may be what failed
            if self._due is not None and self._due.here:
                self.tell(trainer)
        if self._bar:
            self._bar.stop()
