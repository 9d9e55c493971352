"""Executors by name, and what each means for the launcher: who checks the machine and reads the data, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError, unknown_name

if TYPE_CHECKING:
    from launcher.cluster_file import Cluster


@dataclass(frozen=True)
class Executor:
    """What the launcher has to know of an executor before it starts anything.

    Args:
        trains_here: the ranks run on this machine and in its file system: the launcher checks machine and data, and
            records the data, before the start. Elsewhere the ranks do so when they start. (mpirun with hosts starts
            them on other machines that share the files.)
        on_cluster: a scheduler runs the job where the cluster file says, also after the launcher has ended.
    """

    trains_here: bool
    on_cluster: bool = False


EXECUTORS = {
    "direct": Executor(trains_here=True),
    "local": Executor(trains_here=True),
    "mpirun": Executor(trains_here=True),
    "docker": Executor(trains_here=False),
    "slurm": Executor(trains_here=False, on_cluster=True),
    "k8s": Executor(trains_here=False, on_cluster=True),
}


def check(name: str, cluster_file: str | None) -> None:
    """Check what --executor and --cluster say, before anything is built.

    Raises:
        UserError: no such executor, or it needs a cluster file and none is given.
    """
    if name not in EXECUTORS:
        raise unknown_name("executor", name, EXECUTORS, "--executor direct", typed="--executor {}")
    if EXECUTORS[name].on_cluster and cluster_file is None:
        raise UserError(
            f"--executor {name} needs a cluster file",
            expected="--cluster FILE",
            found="none",
            do=f"--cluster docs/clusters/{name}.yaml, or a copy of it that describes your cluster",
        )


def trains_here(name: str | None, cluster: Cluster | None) -> bool:
    """Whether the ranks run on this machine and in its file system; None stands for `direct` or `local`."""
    on_hosts = name == "mpirun" and cluster is not None and cluster.mpirun.has_hosts
    return _has_these_files(name) and not on_hosts


def _has_these_files(name: str | None) -> bool:
    return name is None or EXECUTORS[name].trains_here


def shares_run_folder(name: str | None, cluster: Cluster | None) -> bool:
    """Whether the launcher sees the run directory that the ranks write: logs, metrics and checkpoints.

    It does on this machine, in a container (which mounts the checkout) and on a Slurm cluster's nodes; not behind ssh
    and not in Kubernetes.
    """
    return name != "k8s" and (cluster is None or cluster.tunnel.kind == "local" or _has_these_files(name))


def shares_files(name: str | None, cluster: Cluster | None) -> bool:
    """Whether a path means the same file to the launcher and to the ranks.

    If not, neither the corpora nor the base model nor the checkpoints of the run can be looked at from here. The
    nodes of a Slurm cluster share the file system of the machine that submits; a machine behind ssh, a Kubernetes
    cluster and every container have a file system of their own (a container sees what its mounts and its image hold).
    """
    on_shared_nodes = name == "slurm" and cluster is not None and not cluster.image and cluster.tunnel.kind == "local"
    return _has_these_files(name) or on_shared_nodes
