"""What the executors take from a cluster file: whether the job fits, its folder, its Python and its environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from common.errors import UserError
from common.rundir import check_run_name
from launcher.cluster_file import Cluster, Ssh
from launcher.executors import Job

# Slurm and Kubernetes give each step its GPUs and number them themselves; a set made for one machine must not
# overrule them
_GPU_NUMBERS = "CUDA_VISIBLE_DEVICES"


def check_names(job: Job) -> Cluster:
    """Check that a scheduler can take the job's name and run directory.

    Returns:
        the job's cluster.

    Raises:
        UserError: it cannot.
    """
    check_run_name(job.folder.name)
    assert job.cluster is not None, "launcher.executor_table.check comes first"
    own_files = job.cluster.image is not None or isinstance(job.cluster.tunnel, Ssh)
    check_run_folder(job.folder.path, in_checkout=own_files)
    return job.cluster


def check_size(cluster: Cluster | None, num_nodes: int, devices: int, executor: str) -> None:
    """Check that the cluster file allows a run of this size.

    Raises:
        UserError: more nodes or devices per node than the file allows. (mpirun counts its nodes in the list of hosts.)
    """
    if cluster is None:
        return
    limits = [("devices_per_node", devices, cluster.devices_per_node, "--devices")]
    if executor != "mpirun":
        limits.insert(0, ("nodes", num_nodes, cluster.nodes, "--nodes"))
    for what, wanted, most, option in limits:
        if wanted > most:
            raise UserError(
                f"the run takes more {what} than the cluster file allows",
                expected=f"{most} at most ({what} in the cluster file)",
                found=str(wanted),
                do=f"{option} {most}, or raise {what} in the file",
            )


def check_run_folder(path: Path, *, in_checkout: bool) -> None:
    """Check that the ranks find the run directory, and that its path needs no quotes in a batch script.

    Args:
        in_checkout: the ranks see the checkout, but not this machine's other folders.

    Raises:
        UserError: --runs names a folder that the ranks do not see, or other than plain characters.
    """
    outside = path.is_absolute() or ".." in path.parts
    if (in_checkout and outside) or not re.fullmatch(r"[A-Za-z0-9._/@+=-]+", str(path)):
        raise UserError(
            f"the ranks cannot use the run directory {str(path)!r}",
            expected="a folder below this one, named with A-Z a-z 0-9 . _ / @ + = -",
            found=f"--runs {path.parent}",
            do="leave --runs out, or name such a folder",
        )


def workdir_on_nodes(cluster: Cluster) -> str:
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


def python_on_nodes(cluster: Cluster) -> str:
    """The interpreter on the nodes."""
    if cluster.python:
        return cluster.python
    return "python" if cluster.image else sys.executable


def rank_environment(job: Job, cluster: Cluster) -> dict[str, str]:
    """The environment of every rank on a cluster whose scheduler numbers the GPUs: without a set's numbers."""
    given = dict(job.env)
    if job.accelerator == "gpu" and _GPU_NUMBERS not in cluster.env:
        given.pop(_GPU_NUMBERS, None)
    return given


def torchrun_command(job: Job, python: str) -> list[str]:
    """Start all ranks of one node; for several nodes PET_* variables give torchrun the node and the rendezvous."""
    words = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(job.devices)]
    if job.num_nodes == 1:
        words += ["--standalone", "--local-addr", "127.0.0.1"]  # a container's own name may not resolve
    return [*words, "--max-restarts", "0", *job.rank_command[1:]]
