"""Checkpoints in steps: keep the newest N, and always save where training ends."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from nemo import lightning as nl


class StepCheckpoint(nl.ModelCheckpoint):
    """NeMo's ModelCheckpoint, which also saves the last step of a run (at max_steps or after Ctrl-C).

    The stock class saves at the end only as `-last`, a second full copy.
    """

    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, torch.Tensor]:
        """The metrics a file name can hold, with `step` = steps completed (NeMo logs the step before it)."""
        candidates: dict[str, torch.Tensor] = super()._monitor_candidates(trainer)
        candidates["step"] = torch.tensor(trainer.global_step)
        return candidates

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._last_global_step_saved != trainer.global_step:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        super().on_train_end(trainer, pl_module)
