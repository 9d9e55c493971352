"""Who starts the ranks of a run. Each executor is one module with `submit(job) -> exit code`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from common.errors import unknown_name
from common.rundir import RunDir

if TYPE_CHECKING:
    from launcher.build import Built
    from launcher.cluster_file import Cluster
    from recipes.resolve import Resolved

EXECUTORS: dict[str, str] = {
    "direct": "launcher.executors.direct:submit",
    "local": "launcher.executors.local:submit",
    "mpirun": "launcher.executors.mpirun:submit",
    "docker": "launcher.executors.docker:submit",
    "slurm": "launcher.executors.slurm:submit",
    "k8s": "launcher.executors.k8s:submit",
}
# These run on the machine that the command is typed on; the others find out about theirs on arrival.
HERE = ("direct", "local", "mpirun")


@dataclass(frozen=True)
class Job:
    """A run that is written down and only needs to be started, whoever starts it.

    Args:
        folder: runs/NAME, with spec.json, config.yaml and the rest written.
        logs: this attempt's folder under it, to be made by whoever writes there first (a dry run makes none).
        env: every variable each rank must have (the applied environment set), values unquoted.
        devices: ranks per node.
        num_nodes: nodes.
        accelerator: what a rank computes on.
        cluster: from --cluster FILE.
        dryrun: print what would be submitted on standard error and write it into the run directory; submit nothing.
        rank_command: what every rank runs, in the folder that holds `runs`.
        resume_command: what the user types to go on after a stop.
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


def check(name: str) -> None:
    """
    Raises:
        UserError: no such executor.
    """
    if name not in EXECUTORS:
        raise unknown_name("executor", name, EXECUTORS, "--executor direct")


def resolve(name: str) -> Callable[[Job], int]:
    """The executor's `submit`."""
    module, function = EXECUTORS[name].split(":")
    submit: Callable[[Job], int] = getattr(importlib.import_module(module), function)
    return submit
