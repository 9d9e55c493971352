"""The log slot's class: NeMo's logger, and the services that the run is sent to."""

# NeMo-Run reads the fields' types: no `from __future__ import annotations`, `Optional` instead of `X | None`

from dataclasses import dataclass
from typing import Optional

from nemo import lightning as nl


@dataclass
class RunLogger(nl.NeMoLogger):
    """As NeMo's own, with one more field.

    Args:
        loggers: services that receive the run's metrics beside metrics.jsonl and TensorBoard: `wandb`, `mlflow` or
            `wandb+mlflow`. No Lightning logger is made of it, because one that cannot reach its service holds up the
            training step that it is called in. A process beside rank 0 sends what metrics.jsonl holds
            (launcher/sending.py).
    """

    loggers: Optional[str] = None
