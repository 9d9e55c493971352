"""What every executor of a cluster file asks of it: does the job fit, which folder, which Python, which environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from common.errors import UserError
from launcher.cluster_file import Cluster, plain_name
from launcher.executors import Job

# Slurm gives each step its GPUs and numbers them itself; a set made for one machine must not overrule it
_SLURM_SETS = "CUDA_VISIBLE_DEVICES"


def checked(job: Job) -> Cluster:
    """The job's cluster, if the job fits in.

    Raises:
        UserError: more nodes or devices than it allows.
    """
    plain_name(job.folder.name)
    assert job.cluster is not None, "launcher.executors.check comes first"
    for what, wanted, most, option in (
        ("nodes", job.num_nodes, job.cluster.nodes, "--nodes"),
        ("devices_per_node", job.devices, job.cluster.devices_per_node, "--devices"),
    ):
        if wanted > most:
            raise UserError(
                f"the run takes more {what} than the cluster file allows",
                expected=f"{most} at most ({what} in the cluster file)",
                found=str(wanted),
                do=f"{option} {most}, or raise {what} in the file",
            )
    return job.cluster


def workdir_of(cluster: Cluster) -> str:
    """The checkout as the nodes see it.

    Raises:
        UserError: this folder's name holds what Slurm would expand.
    """
    folder = cluster.workdir or str(Path.cwd())
    if re.search(r"[%\\:,\x00-\x1f]", folder):
        raise UserError(
            "this folder's name cannot be given to a scheduler",
            expected="a path without % \\ : , and control characters",
            found=repr(folder),
            do="move the checkout, or set workdir in the cluster file",
        )
    return folder


def python_of(cluster: Cluster) -> str:
    """The interpreter on the nodes."""
    if cluster.python:
        return cluster.python
    return "python" if cluster.image else sys.executable


def exported(job: Job, cluster: Cluster) -> dict[str, str]:
    """The environment of every rank: the applied set, and over it what the site needs."""
    given = {**job.env, **cluster.env}
    if job.accelerator == "gpu" and _SLURM_SETS not in cluster.env:
        given.pop(_SLURM_SETS, None)
    return given


def torchrun(job: Job, python: str) -> list[str]:
    """Starts all ranks of one node; for several nodes PET_* variables say which node it is and where they meet."""
    words = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(job.devices)]
    if job.num_nodes == 1:
        words += ["--standalone", "--local-addr", "127.0.0.1"]  # a container's own name may lead nowhere
    return [*words, "--max-restarts", "0", *job.rank_command[1:]]
