"""Tells the heartbeat which step and which phase the training is in."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from common import run_status
from training import heartbeat


class StatusCallback(pl.Callback):
    """Sets phase and step in memory at the borders of a step; reads nothing from the device."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        heartbeat.record(step=trainer.global_step, max_steps=trainer.max_steps)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        heartbeat.enter_phase(run_status.TRAINING)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        heartbeat.record(step=trainer.global_step, step_time=time.time())

    def on_save_checkpoint(self, *_: Any) -> None:
        heartbeat.enter_phase(run_status.SAVING)
