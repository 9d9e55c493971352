"""Ctrl-C: finish the step, save, stop. A second Ctrl-C stops at once."""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

log = logging.getLogger("launch")


class Interrupted(Exception):  # noqa: N818 - it is an outcome, not an error
    """The run was stopped by the user; its last checkpoint is whole."""


class StopOnInterrupt(pl.Callback):
    """SIGINT ends training after the current step, with a checkpoint (every rank agrees on the step)."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.asked = True
        log.warning("Ctrl-C: finishing this step and saving; press again to stop at once")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        asked = self.asked
        if trainer.world_size > 1:
            asked = trainer.strategy.reduce_boolean_decision(asked, all=False)
        if asked:
            trainer.should_stop = True
            trainer.limit_val_batches = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGINT, self._previous or signal.default_int_handler)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        signal.signal(signal.SIGINT, self._previous or signal.default_int_handler)
        if torch.distributed.is_initialized() and isinstance(exception, KeyboardInterrupt):
            log.warning("stopped at once: steps since the last checkpoint are lost")
