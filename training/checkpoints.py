"""Checkpoints every N steps and at the end of training; keeps the newest ones and the best of one domain."""

# NeMo-Run reads the constructor's types to parse overrides: no `from __future__ import annotations`, no `X | Y`

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Optional

import lightning.pytorch as pl
import torch
from nemo import lightning as nl
from nemo.utils.get_rank import is_global_rank_zero

from common.rundir import RunDir


class StepCheckpoint(nl.ModelCheckpoint):
    """NeMo's ModelCheckpoint, which here decides what to keep from the checkpoints found on the disk.

    The stock class knows only the checkpoints of its own process, so that those of a killed process stay for ever, and
    it saves the end of a run as a second full copy, without the optimizer state.

    Args:
        every_n_train_steps: steps between two saves. The last step of a run is always saved.
        keep_last: how many of the newest complete checkpoints to keep.
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
        self.keep_last, self.keep_best = keep_last, keep_best
        self.run = RunDir.at(run_dir) if run_dir else None
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

    def _get_finalize_save_checkpoint_callback(
        self, trainer: pl.Trainer, filepath: str, global_step: int
    ) -> Callable[[], None]:
        finalize = super()._get_finalize_save_checkpoint_callback(trainer, filepath, global_step)
        step, losses = self.domain_losses
        loss = losses.get(self.keep_best) if self.keep_best and step == trainer.global_step else None

        def finalize_and_retain() -> None:
            finalize()
            if self.run and is_global_rank_zero():
                self._retain(self.run, Path(str(filepath).removesuffix(".ckpt")), loss)

        return finalize_and_retain

    def _retain(self, run: RunDir, saved: Path, loss: float | None) -> None:
        """Copy the run's configuration into the new checkpoint, then delete the checkpoints that need not stay."""
        (saved / "run").mkdir(exist_ok=True)
        for path in (run.config, run.env, run.command, run.version):
            if path.exists():
                shutil.copy(path, saved / "run")
        if loss is not None:
            (saved / "run" / "best.json").write_text(json.dumps({"domain": self.keep_best, "loss": loss}))
        checkpoints = run.complete_checkpoints()
        best = self._best(checkpoints)
        keep = {*checkpoints[-self.keep_last :], *([best] if best else [])}
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
