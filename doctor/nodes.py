"""`launch.py doctor --cluster FILE`: start doctor/node_rank.py on every node through an executor."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from common import logs
from common.commands import launch_command
from common.environment.merge import Setting, Site, complete_name, resolve_environment
from common.environment.shell import shell_settings
from common.errors import UserError
from common.rundir import RunDir
from common.spec import RunSpec
from doctor.transports import RankLayout
from launcher import executor_table, executors
from launcher.cluster_file import Cluster
from launcher.executors import Job
from launcher.executors.on_cluster import check_size
from launcher.load_cluster import load_cluster, with_layers

RUNS = Path("doctor-runs")  # beside `runs`: these are not runs, and the nodes must see the folder
log = logging.getLogger("launch")


def run_on_nodes(
    file: Path,
    executor: str | None = None,
    nodes: int | None = None,
    devices: int | None = None,
    env: str | None = None,
) -> int:
    """Check every node of a cluster, and the links between them.

    Args:
        file: the cluster file.
        executor: what starts the ranks; None takes the one that the file describes.
        nodes, devices: how many nodes, and ranks on each; None takes all that the file allows.
        env: environment sets to test instead of those for such a run (+SET adds); `cpu` for nodes without GPUs.

    Returns:
        0, 3 if a check fails on a node, or the exit code of the rank that failed first.

    Raises:
        UserError: a wrong cluster file, or more nodes than it allows.
    """
    logs.log_to_console()
    cluster = load_cluster(file)
    executor = executor or guess_executor(cluster)
    executor_table.check(executor, str(file))
    hosts = len(cluster.mpirun.host_names) if executor == "mpirun" else 0
    layout = RankLayout(devices=devices or cluster.devices_per_node, num_nodes=nodes or hosts or cluster.nodes)
    check_size(cluster, layout.num_nodes, layout.devices, executor)
    name = complete_name(env, "multinode-ib" if layout.num_nodes > 1 else "dual")
    if "cpu" in name.split("+"):
        layout = RankLayout(layout.devices, layout.num_nodes, accelerator="cpu")
    settings = _settings(with_layers(name, cluster), layout, Site(cluster.env, str(file), elsewhere=True), executor)
    job = _write_job(file, cluster, executor, layout, settings)
    executors.check(executor, job)
    log.info("doctor: %d node(s) x %d rank(s) of %s through %s", layout.num_nodes, layout.devices, file, executor)
    return executors.resolve(executor)(job)


def check_options(cluster: Path | None, *, with_cluster: Mapping[str, object], without: Mapping[str, object]) -> None:
    """Check that no option is given that would be ignored.

    Args:
        with_cluster: options that only `doctor --cluster` takes, with their values.
        without: options that only a plain `doctor` takes, with their values.

    Raises:
        UserError: one is given.
    """
    ignored = [option for option, value in (with_cluster if cluster is None else without).items() if value]
    if ignored:
        raise UserError(
            f"{', '.join(ignored)} {'needs --cluster FILE' if cluster is None else 'is for this machine only'}",
            expected=f"{', '.join(with_cluster)} with --cluster; {', '.join(without)} without",
            found="no --cluster" if cluster is None else f"--cluster {cluster}",
            do=f"leave {' and '.join(ignored)} out" + (", or add --cluster FILE" if cluster is None else ""),
        )


def guess_executor(cluster: Cluster) -> str:
    """The executor that a cluster file describes: the part that only this executor reads."""
    if cluster.k8s is not None:
        return "k8s"
    if cluster.mpirun.has_hosts:
        return "mpirun"
    return "docker" if cluster.image and not (cluster.partition or cluster.account) else "slurm"


def _settings(name: str, layout: RankLayout, site: Site, executor: str) -> list[Setting]:
    """The environment that a run with this set would have on the cluster."""
    found = [s for s in resolve_environment(name, os.environ, layout, site) if not s.only_if]
    return found + shell_settings(os.environ, found, same_files=executor == "mpirun", same_machine=False)


def _write_job(file: Path, cluster: Cluster, executor: str, layout: RankLayout, settings: list[Setting]) -> Job:
    folder = RunDir(f"nodes-{file.stem}", RUNS)
    attempt = len(folder.attempts) + 1
    folder.path.mkdir(parents=True, exist_ok=True)
    spec = RunSpec(recipe="doctor", executor=executor, name=folder.name, runs=str(RUNS), attempt=attempt)
    folder.write(spec, "", settings, sys.argv)
    return Job(
        folder=folder,
        logs=folder.attempt(attempt),
        env={setting.key: setting.value for setting in settings},
        devices=layout.devices,
        num_nodes=layout.num_nodes,
        accelerator="cpu" if layout.accelerator == "cpu" else "gpu",
        cluster=cluster,
        dryrun=False,
        rank_command=("python", "-m", "doctor.node_rank", str(folder.path)),
        resume_command=launch_command("doctor", "--cluster", str(file)),
    )
