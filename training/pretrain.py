"""The recipe's own function: NeMo's pretrain with this project's validation, speed levers and CPU support."""

# no `from __future__ import annotations`: NeMo-Run reads the signature's types to parse overrides

import contextlib
from pathlib import Path

import lightning.pytorch as pl
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning.pytorch.optim import OptimizerModule
from nemo.utils.get_rank import is_global_rank_zero

from training import compat, cpu, evaluation, sigterm
from training.cut_files import explain_cut_files
from training.documents import IsolateDocuments
from training.evaluation import EvaluateCheckpoints
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
    evaluate: EvaluateCheckpoints | None = None,
) -> Path:
    """Run `llm.pretrain`, with CUDA emulated if `trainer.accelerator` is "cpu".

    It is the recipe's own function, so that every executor calls it in the same way.

    Returns:
        NeMo's log directory.

    Raises:
        Interrupted: Ctrl-C ended the run after a complete step and a checkpoint.
    """
    compat.apply()
    trainer.callbacks.insert(0, DomainValidation.replace_lightning_loop(trainer))
    trainer.callbacks.append(StatusCallback())
    if getattr(data, "isolate_documents", False):
        trainer.callbacks.append(IsolateDocuments(data))
    if speed is not None:
        speed.before_build(model)
        trainer.callbacks.append(speed)
    if evaluate is not None and log is not None and evaluate.every_n_steps and is_global_rank_zero():
        evaluate.attach(log.ckpt)
        trainer.callbacks.append(evaluate)
    on_cpu = isinstance(trainer.accelerator, pl.accelerators.CPUAccelerator)
    try:
        with (
            cpu.emulate_cuda() if on_cpu else contextlib.nullcontext(),
            explain_cut_files(getattr(data, "domain_folders", {}).values()),
        ):
            folder: Path = llm.pretrain(model=model, data=data, trainer=trainer, log=log, resume=resume, optim=optim)
    except BaseException:
        evaluation.stop()
        raise
    finally:
        sigterm.kill_children()
    stopped = any(isinstance(callback, StopOnInterrupt) and callback.stop_requested for callback in trainer.callbacks)
    if stopped and trainer.global_step < trainer.max_steps:
        evaluation.stop()
        raise Interrupted
    return folder
