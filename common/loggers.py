"""The services that a run can send its metrics to: their names, and the packages that they need."""

from __future__ import annotations

import importlib.util

WANDB, MLFLOW = "wandb", "mlflow"
TITLES = {WANDB: "Weights & Biases", MLFLOW: "MLflow"}  # the names are those of the packages to import
PACKAGES = {WANDB: "wandb==0.28.0", MLFLOW: "mlflow-skinny==3.17.2"}  # as in constraints.txt and tests/mlflow.txt


def parse_loggers(text: str | None) -> tuple[str, ...]:
    """`wandb+mlflow` as names in that order, each once; whether they are known is for the caller to check."""
    words = (text or "").replace(",", "+").split("+")
    return tuple(dict.fromkeys(word.strip().lower() for word in words if word.strip()))


def install_command(name: str) -> str:
    """What installs the package of a service."""
    return f"pip install '{PACKAGES[name]}'"


def is_installed(name: str) -> bool:
    """Whether the package of a service can be imported; it is not imported."""
    return importlib.util.find_spec(name) is not None
