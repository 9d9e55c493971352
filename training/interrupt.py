"""Ctrl-C, or a scheduler's SIGTERM: finish the step, save, stop. A second one stops at once."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

from training import global_totals as whole
from training import sigterm
from training.async_read import Later

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # the last is the one that mpirun passes on
log = logging.getLogger("launch")


class Interrupted(Exception):  # noqa: N818 - it is an outcome, not an error
    """The run was stopped by the user; its last checkpoint is whole."""


class StopOnInterrupt(pl.Callback):
    """SIGINT or SIGTERM ends training after the current step, with a checkpoint.

    Every rank agrees on the step. On several GPUs it is the next one: reading the ranks' votes of this one would make
    the host wait for the GPU in every step.
    """

    def __init__(self) -> None:
        self.asked = False
        self._votes: Later | None = None
        self._owner = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and os.getpid() != self._owner:  # a forked helper, which its parent ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.asked:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        self.asked = True
        name = "SIGTERM" if number == signal.SIGTERM else "Ctrl-C"
        log.warning("%s: finishing this step and saving; once more stops at once", name)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._owner = os.getpid()
        self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.asked and sigterm.is_pending():
            log.warning("SIGTERM from the scheduler: saving, then stopping")
            self.asked = True
        asked = self.asked
        if trainer.world_size > 1:
            asked = self._any_rank(late=torch.cuda.is_available() and trainer.global_step < trainer.max_steps)
        if asked:
            self.asked = True  # also where another rank was asked
            trainer.should_stop = True
            trainer.limit_val_batches = 0

    def _any_rank(self, late: bool) -> bool:
        """Was any rank asked: by now, or (late) by the end of the step before? Called on all ranks."""
        before, self._votes = self._votes, Later({"asked": whole.total([int(self.asked)])})
        known = before if late else self._votes
        return known is not None and known.read()["asked"] != [0]

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()
        if torch.distributed.is_initialized() and isinstance(exception, KeyboardInterrupt):
            log.warning("stopped at once: steps since the last checkpoint are lost")
