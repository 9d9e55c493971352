"""What runs in every training process: NeMo's pretrain, on the backend that the recipe names."""

# no `from __future__ import annotations` here: NeMo-Run reads the signature's types to parse overrides

import contextlib
from pathlib import Path

import lightning.pytorch as pl
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning.pytorch.optim import OptimizerModule

from training import compat, cpu
from training.interrupt import Interrupted, StopOnInterrupt
from training.speed import Speed
from training.status_callback import StatusCallback
from training.validation import DomainValidation


def pretrain(
    model: pl.LightningModule,
    data: pl.LightningDataModule,
    trainer: nl.Trainer,
    log: nl.NeMoLogger | None = None,
    resume: nl.AutoResume | None = None,
    optim: OptimizerModule | None = None,
    speed: Speed | None = None,
) -> Path:
    """`llm.pretrain`, inside the CPU backend if `trainer.accelerator` is "cpu".

    Being the recipe's own function it acts the same in every executor. Returns the log directory.

    Raises:
        Interrupted: Ctrl-C ended the run after a whole step and a checkpoint.
    """
    compat.apply()
    trainer.callbacks.insert(0, DomainValidation.instead_of_lightnings(trainer))
    trainer.callbacks.append(StatusCallback())
    if speed is not None:
        speed.before_build(model)
        trainer.callbacks.append(speed)
    on_cpu = isinstance(trainer.accelerator, pl.accelerators.CPUAccelerator)
    with cpu.backend() if on_cpu else contextlib.nullcontext():
        folder = llm.pretrain(model=model, data=data, trainer=trainer, log=log, resume=resume, optim=optim)
    if any(isinstance(callback, StopOnInterrupt) and callback.asked for callback in trainer.callbacks):
        raise Interrupted
    return folder
