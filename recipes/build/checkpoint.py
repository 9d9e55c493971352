"""The log and resume slots: TensorBoard and other loggers, checkpoints in steps, keep the last N.

Paths are set by common/rundir.py.
"""

from __future__ import annotations

import nemo_run as run
from lightning.pytorch.loggers import TensorBoardLogger

from recipes.plan import Plan
from training.checkpoints import StepCheckpoint
from training.restore import StartFrom
from training.run_logger import RunLogger


def log(plan: Plan) -> run.Config[RunLogger]:
    """Checkpoints every `save_every_n_steps` steps, the newest `keep_checkpoints` kept (and the best of one domain).

    The stock recipe keeps ten by validation loss every 15 minutes (about 97 GB for 0.5B) and
    drops the optimizer state of the last one, so that a finished run could not be extended.
    """
    ckpt = run.Config(
        StepCheckpoint,
        keep_last=plan.keep_checkpoints,
        keep_best=plan.keep_best,
        every_n_train_steps=plan.save_every_n_steps,
    )
    return run.Config(
        RunLogger,
        ckpt=ckpt,
        tensorboard=run.Config(TensorBoardLogger, save_dir="runs", name="tb", version=""),
        update_logger_directory=False,
        loggers=plan.loggers,
    )


def resume(plan: Plan) -> run.Config[StartFrom]:
    """From `plan.base`, or from scratch. No guessing: `--resume` names the checkpoint (launcher/launch.py)."""
    return run.Config(StartFrom, base=plan.base)
