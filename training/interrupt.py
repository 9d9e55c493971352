"""Ctrl-C, SIGTERM or SIGHUP: finish the step, save a checkpoint, stop. A second Ctrl-C stops at once."""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch

from common.processes import not_ignored
from training import sigterm
from training.async_read import AsyncRead
from training.global_totals import sum_over_ranks

_CTRL_C = (signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: from the launcher (launcher/executors/signals.py)
log = logging.getLogger("launch")


class Interrupted(Exception):  # noqa: N818 - it is an outcome, not an error
    """The user stopped the run; its last checkpoint is complete."""


class StopOnInterrupt(pl.Callback):
    """Ends training after the current step, with a checkpoint, when a signal asks for it.

    A closing terminal can send SIGHUP twice, and a scheduler SIGTERM: only a second Ctrl-C gives the checkpoint up. The
    signals are handled until the last checkpoint is written, not only until the last step.

    All ranks stop after the same step. On several GPUs that is one step later: reading the ranks' requests of the
    current step would make the host wait for the GPU in every step.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._ended = False  # the last step is done
        self._ctrl_c = 0
        self._requests: AsyncRead | None = None
        self._main_process = os.getpid()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and os.getpid() != self._main_process:  # a forked helper, ended by its parent
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._ctrl_c += number in _CTRL_C
        if self._ctrl_c > 1:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt
        name = "Ctrl-C" if number in _CTRL_C else signal.Signals(number).name
        if self._ended:
            log.warning("%s: the last checkpoint is being saved; a Ctrl-C now stops at once", name)
        elif not self.stop_requested:
            log.warning("%s: finishing this step and saving; a Ctrl-C now stops at once", name)
            self.stop_requested = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._main_process = os.getpid()
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in not_ignored()}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self.stop_requested and sigterm.is_pending():
            log.warning("SIGTERM from the scheduler: saving, then stopping")
            self.stop_requested = True
        stop = self.stop_requested
        if trainer.world_size > 1:
            delayed = torch.cuda.is_available() and trainer.global_step < trainer.max_steps
            stop = self._any_rank_requests_stop(delayed)
        if stop:
            self.stop_requested = True  # also where another rank got the signal
            trainer.should_stop = True
            trainer.limit_val_batches = 0

    def _any_rank_requests_stop(self, delayed: bool) -> bool:
        """Whether any rank has got a signal by now, or, if `delayed`, by the end of the step before.

        To be called on all ranks.
        """
        before, self._requests = self._requests, AsyncRead({"stop": sum_over_ranks([int(self.stop_requested)])})
        requests = before if delayed else self._requests
        return requests is not None and requests.read()["stop"] != [0]

    def _restore_handlers(self) -> None:
        for number, previous in self._previous_handlers.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous_handlers = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._ended = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """All checkpoints are written: what follows may be interrupted."""
        self._restore_handlers()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore_handlers()
        if torch.distributed.is_initialized() and isinstance(exception, KeyboardInterrupt):
            log.warning("stopped at once: the steps since the last checkpoint are lost")
