"""Executors start the ranks of a run: one module per name of launcher/executor_table.py, with `submit(job)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common.rundir import RunDir

if TYPE_CHECKING:
    from launcher.build import Built
    from launcher.cluster_file import Cluster
    from recipes.resolve import Resolved


@dataclass(frozen=True)
class Job:
    """A run that is written down and only needs to be started.

    Args:
        folder: runs/NAME, with spec.json, config.yaml and the rest written.
        logs: this attempt's folder under it; the first process that writes there makes it (a dry run makes none).
        env: every variable each rank must have (env.json: set, cluster file, the user's shell), values unquoted.
        devices: ranks per node.
        num_nodes: nodes.
        accelerator: what a rank computes on.
        cluster: from --cluster FILE.
        dryrun: print what would be submitted on standard error and write it into the run directory; submit nothing.
        rank_command: what every rank runs, in the folder that holds `runs`.
        resume_command: what the user types to resume the run after a stop.
        resolved, built: the launcher's own, for the executor whose rank is the launcher's process.
    """

    folder: RunDir
    logs: Path
    env: dict[str, str]
    devices: int
    num_nodes: int
    accelerator: Literal["gpu", "cpu"]
    cluster: Cluster | None
    dryrun: bool
    rank_command: tuple[str, ...]
    resume_command: str
    resolved: Resolved | None = None
    built: Built | None = None

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


def check(name: str, job: Job) -> None:
    """Check what the executor needs of the run, before NeMo is imported and before anything is written.

    Raises:
        UserError: a name that a scheduler cannot take, more nodes than there are, an incomplete cluster file.
    """
    module = importlib.import_module(f"launcher.executors.{name}")
    if hasattr(module, "check"):
        module.check(job)


def resolve(name: str) -> Callable[[Job], int]:
    """The executor's `submit(job)`, which returns the exit code; only its own module is imported."""
    submit: Callable[[Job], int] = importlib.import_module(f"launcher.executors.{name}").submit
    return submit
