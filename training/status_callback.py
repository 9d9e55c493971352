"""Tells the heartbeat and the hang watch which step and which phase the training is in."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from common import run_status
from training import hang_watch, heartbeat
from training.progress import max_time_left_s


class StatusCallback(pl.Callback):
    """Sets phase and step in memory at the borders of a step; reads nothing from the device. Comes last of all."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        left_s = max_time_left_s(trainer)
        ends_by = None if left_s is None else time.time() + left_s
        heartbeat.record(step=trainer.global_step, max_steps=trainer.max_steps, ends_by=ends_by)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        heartbeat.enter_phase(run_status.TRAINING)
        hang_watch.begin_step()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        hang_watch.end_step()
        heartbeat.record(step=trainer.global_step, step_time=time.time())

    def on_save_checkpoint(self, *_: Any) -> None:
        heartbeat.enter_phase(run_status.SAVING)
