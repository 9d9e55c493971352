"""The services by name; their packages are imported when the first numbers are sent."""

from __future__ import annotations

from common.errors import UserError, unknown_name
from common.loggers import MLFLOW, TITLES, WANDB, install_command, is_installed
from report.send.mlflow_service import MlflowService
from report.send.service import Service
from report.send.wandb_service import WandbService

_SERVICES: dict[str, type[Service]] = {WANDB: WandbService, MLFLOW: MlflowService}


def open_service(name: str) -> Service:
    """A service that is not connected yet.

    Raises:
        UserError: there is no service of this name, or its package is not installed.
    """
    if name not in _SERVICES:
        raise unknown_name("logger", name, list(_SERVICES), "docs/loggers.md describes them")
    if not is_installed(name):
        raise UserError(
            f"{TITLES[name]} is not installed",
            expected=f"its package, {name}",
            found="no such package",
            do=install_command(name),
        )
    return _SERVICES[name]()
