"""Validates checkpoints on the samples of their run's own validation, and trains nothing."""

# NeMo-Run reads the constructor's types: no `from __future__ import annotations`, `Optional` instead of `X | None`

import json
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
from nemo import lightning as nl

from common.files import write_atomic
from common.rundir import RunDir
from training.document_losses import load_first
from training.validation import DomainValidation, Found, domain_row

RESULT = "checkpoints-validated.json"


class ValidateCheckpoints(pl.Callback):
    """Measures every domain with the weights of each checkpoint, writes the result, and ends before the first step.

    The result, in the run directory: `checkpoints`, for each a validation row as metrics.jsonl has it, by domain; and
    `change`, by domain the difference of the last one from the first one on the same documents, with its paired
    standard error (nats per token).

    Args:
        checkpoints: their folders, at least one.
        first_validation: first-validation.npz of their run; the rows hold the change since then.
        run_dir: the run directory to write into. The launcher sets it.
    """

    def __init__(
        self, checkpoints: list[str], first_validation: Optional[str] = None, run_dir: Optional[str] = None
    ) -> None:
        self.checkpoints, self.first_validation = checkpoints, first_validation
        self.run = RunDir.at(run_dir) if run_dir else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        _validation_of(trainer).only_when_asked = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        validation = _validation_of(trainer)
        found = []
        for checkpoint in self.checkpoints:
            _load_weights(trainer, checkpoint)
            found.append(validation.measure(trainer))
        if self.run is not None and trainer.is_global_zero:
            write_atomic(self.run.path / RESULT, json.dumps(self._describe(trainer.datamodule, found), indent=1) + "\n")
        trainer.should_stop = True

    def _describe(self, data: Any, found: list[Found]) -> dict[str, Any]:
        step, first = (load_first(Path(self.first_validation)) if self.first_validation else None) or (0, {})
        rows = [
            {
                name: domain_row(loss, documents, data.domains[name], first.get(name), step)
                for name, (loss, documents) in one.items()
            }
            for one in found
        ]
        change = {name: now.change_since(found[0][name][1]) for name, (_, now) in found[-1].items()}
        return {"checkpoints": rows, "change": change}


def _validation_of(trainer: pl.Trainer) -> DomainValidation:
    return next(one for one in trainer.callbacks if isinstance(one, DomainValidation))


def _load_weights(trainer: pl.Trainer, checkpoint: str) -> None:
    """Replace the model's weights by those of a checkpoint, through the strategy's own restore."""
    strategy: Any = trainer.strategy
    strategy.restore_config = nl.RestoreConfig(path=checkpoint, load_optim_state=False, load_artifacts=False)
    strategy.selective_restore()
