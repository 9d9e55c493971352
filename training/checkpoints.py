"""Checkpoints every N steps and at the end of training; keeps the newest ones and the best of one domain."""

# NeMo-Run reads the constructor's types to parse overrides: no `from __future__ import annotations`, no `X | Y`

import contextlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import lightning.pytorch as pl
import torch
from nemo import lightning as nl
from nemo.utils.get_rank import is_global_rank_zero
from torch.distributed.checkpoint import FileSystemReader

from common.checkpoint_files import record_files
from common.files import write_atomic
from common.rundir import RunDir, checkpoint_step
from training.checkpoint_writer import CheckpointError

log = logging.getLogger("launch")


class StepCheckpoint(nl.ModelCheckpoint):
    """NeMo's ModelCheckpoint, which here decides what to keep from the checkpoints found on the disk.

    The stock class knows only the checkpoints of its own process, so that those of a killed process stay for ever, and
    it saves the end of a run as a second full copy, without the optimizer state.

    Args:
        every_n_train_steps: steps between two saves. The last step of a run is always saved.
        keep_last: how many of the newest complete checkpoints to keep.
        keep_every_n_steps: keep for good the checkpoints whose step is a multiple of this number.
        keep_best: a validation domain. Of the checkpoints saved at a validated step, the one with the lowest loss on
            this domain is kept too.
        dirpath: the folder of the checkpoints. The launcher sets it.
        run_dir: the run directory runs/NAME. The launcher sets it. Without it every checkpoint is kept.
    """

    def __init__(
        self,
        every_n_train_steps: int = 500,
        keep_last: int = 2,
        keep_best: Optional[str] = None,
        keep_every_n_steps: Optional[int] = None,
        dirpath: Optional[str] = None,
        run_dir: Optional[str] = None,
    ) -> None:
        super().__init__(
            monitor=None,
            save_top_k=-1,
            save_last=False,
            save_optim_on_train_end=True,
            auto_insert_metric_name=False,
            verbose=False,
            every_n_train_steps=every_n_train_steps,
            dirpath=dirpath,
            filename="step-{step}",
        )
        self.keep_last, self.keep_best, self.keep_every_n_steps = keep_last, keep_best, keep_every_n_steps
        self.run = RunDir.at(run_dir) if run_dir else None
        self.on_complete: Callable[[Path], None] | None = None  # called on rank 0 with each complete checkpoint
        self.domain_losses: tuple[int, dict[str, float]] = (-1, {})  # (step, loss by domain), set by the validation

    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, torch.Tensor]:
        """The metrics for a file name, with `step` = completed steps (NeMo logs the number of the step before)."""
        candidates: dict[str, torch.Tensor] = super()._monitor_candidates(trainer)
        candidates["step"] = torch.tensor(trainer.global_step)
        return candidates

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._last_global_step_saved != trainer.global_step:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Finish a save that is under way. Several ranks cannot: one of them may be the reason."""
        if trainer.world_size == 1 and not isinstance(exception, (KeyboardInterrupt, CheckpointError)):
            with contextlib.suppress(Exception):  # the first error is the one to report
                self._wait_for_pending(trainer)

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        """Save, after the save before has ended: each holds a copy of weights and optimizer state in host memory."""
        if _pending_saves(trainer):
            log.warning("checkpoint: the save before step %d is still being written; waiting", trainer.global_step)
            self._wait_for_pending(trainer)
        super()._save_checkpoint(trainer, filepath)

    def _wait_for_pending(self, trainer: pl.Trainer) -> None:
        if _pending_saves(trainer):
            trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)

    def _get_finalize_save_checkpoint_callback(
        self, trainer: pl.Trainer, filepath: str, global_step: int
    ) -> Callable[[], None]:
        finalize = super()._get_finalize_save_checkpoint_callback(trainer, filepath, global_step)
        step, losses = self.domain_losses
        loss = losses.get(self.keep_best) if self.keep_best and step == trainer.global_step else None
        saved = Path(str(filepath).removesuffix(".ckpt"))
        ledger = _ledger_text(trainer)

        def finalize_and_retain() -> None:
            """Complete the files, then let NeMo remove the marker of an unfinished checkpoint, then delete others."""
            if is_global_rank_zero():
                check_written(saved)
                if self.run:
                    self._add_run_files(self.run, saved, loss, ledger)
                record_files(saved)
            finalize()
            if self.run and is_global_rank_zero():
                if self.on_complete is not None:
                    self.on_complete(saved)
                self._retain(self.run)

        return finalize_and_retain

    def _add_run_files(self, run: RunDir, saved: Path, loss: float | None, ledger: str | None) -> None:
        """Copy the run's configuration into the new checkpoint, its loss on the domain `keep_best`, and its ledger."""
        (saved / "run").mkdir(exist_ok=True)
        for path in (run.config, run.env, run.command, run.version):
            if path.exists():
                shutil.copy(path, saved / "run")
        if ledger is not None:
            (saved / "run" / run.ledger.name).write_text(ledger)
            write_atomic(run.ledger, ledger)
        if loss is not None:
            (saved / "run" / "best.json").write_text(json.dumps({"domain": self.keep_best, "loss": loss}))

    def _retain(self, run: RunDir) -> None:
        """Delete the checkpoints that need not stay."""
        checkpoints = run.complete_checkpoints()
        best, every = self._best(checkpoints), self.keep_every_n_steps
        keep = {*checkpoints[-self.keep_last :], *([best] if best else [])}
        keep |= {folder for folder in checkpoints if every and checkpoint_step(folder) % every == 0}
        for old in set(checkpoints) - keep:
            shutil.rmtree(old, ignore_errors=True)

    def _best(self, checkpoints: list[Path]) -> Path | None:
        """The checkpoint with the lowest loss on the domain `keep_best`; None if no checkpoint was validated on it."""
        losses = {}
        for folder in checkpoints:
            file = folder / "run" / "best.json"
            if self.keep_best and file.exists() and (row := json.loads(file.read_text()))["domain"] == self.keep_best:
                losses[folder] = row["loss"]
        return min(losses, key=lambda folder: losses[folder]) if losses else None


def _ledger_text(trainer: pl.Trainer) -> str | None:
    """What the run has read by this step (data/ledger.py), on rank 0; None of a data module without a ledger."""
    if not is_global_rank_zero() or not hasattr(trainer.datamodule, "ledger_after"):
        return None
    ledger = trainer.datamodule.ledger_after(trainer.global_step)
    return ledger.to_json() if ledger is not None else None


def _pending_saves(trainer: pl.Trainer) -> int:
    calls = getattr(trainer.strategy.checkpoint_io, "async_calls_queue", None)
    return int(calls.get_num_unfinalized_calls()) if calls is not None else 0


def check_written(checkpoint: Path) -> None:
    """Check that every file which the checkpoint's metadata name exists with all its bytes.

    Raises:
        CheckpointError: one is missing or too short.
    """
    weights = checkpoint / "weights"
    ends: dict[str, int] = {}
    for stored in FileSystemReader(weights).read_metadata().storage_data.values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in ends.items():
        size = (weights / name).stat().st_size if (weights / name).is_file() else None
        if size is None or size < end:
            raise CheckpointError(
                f"{checkpoint.name} is not complete",
                expected=f"weights/{name} with {end:,} bytes",
                found="no such file" if size is None else f"{size:,} bytes",
                do="look at the disk and at the ranks' logs, then continue from the checkpoint before it",
            )
