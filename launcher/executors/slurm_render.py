"""Render the batch script of a run from slurm.sbatch.j2.

NeMo-Run's own renderer is not used: in nemo_run 0.4.0 SlurmBatchRequest.materialize always gives srun
--container-mounts and --container-workdir, which Slurm without pyxis rejects, and a working folder /nemo_run/code,
which only its own packaging makes (NeMo issue 12615); it upper-cases the names of environment variables and leaves
their values unquoted; and `noquote` is an alias of str, so that no word of its srun line is ever quoted. Test:
tests/launcher/executors/test_slurm_render.py.
"""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Literal

import jinja2

from common.errors import EXIT_NO_RETRY
from launcher.cluster_file import Cluster
from launcher.executors import Job
from launcher.executors.on_cluster import python_on_nodes, rank_environment, workdir_on_nodes

log = logging.getLogger("launch")
TEMPLATE = "slurm.sbatch.j2"
_CODE = Path(__file__).resolve().parents[2]  # the launcher's own checkout


def render(job: Job, cluster: Cluster, logs: str) -> str:
    """The batch script of `job`.

    Args:
        logs: folder of Slurm's own logs, made of characters that need no quotes.
    """
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    other_folder = cluster.workdir is None and workdir_on_nodes(cluster) != str(_CODE)
    return templates.get_template(TEMPLATE).render(
        run=job.folder.name,
        by_hand=f"sbatch {logs}/{job.folder.name}.sbatch",
        sbatch=_sbatch_options(job, cluster, logs),
        environment=rank_environment(job, cluster),
        code=str(_CODE) if other_folder else None,
        requeue=cluster.slurm.requeue,
        retries=job.resolved.spec.retries if job.resolved else 0,
        attempts=f"{job.folder.path}/logs/attempt-",
        first_attempt=int(job.logs.name.rsplit("-", 1)[-1]),
        logs=logs,
        srun=[*_container_options(job, cluster), *cluster.slurm.srun],
        ask=[python_on_nodes(cluster), "-m", "watch.retry_helps", str(job.folder.path)],
        no_retry=EXIT_NO_RETRY,
        command=[python_on_nodes(cluster), *job.rank_command[1:]],
    )


def _sbatch_options(job: Job, cluster: Cluster, logs: str) -> dict[str, str | Literal[True]]:
    """sbatch's options by name, True for a flag, in alphabetical order."""
    name = job.folder.name
    given: dict[str, str | Literal[True] | None] = {
        "account": cluster.account,
        "job-name": name,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": str(job.devices),
        "open-mode": "append",  # a job that was requeued keeps what its log holds
        "output": f"{logs}/sbatch_{name}_%j.out",
        "partition": cluster.partition,
        "signal": f"TERM@{cluster.slurm.stop_before_end_s}" if cluster.time else None,
        "time": cluster.time,
        **cluster.slurm.sbatch,
    }
    if job.accelerator == "gpu" and not {"gres", "gpus", "gpus-per-node", "gpus-per-task"} & set(given):
        log.info(
            "slurm: gpus-per-node=%d (one per rank; sbatch: {gres: ...} in the cluster file changes it)", job.devices
        )
        given["gpus-per-node"] = str(job.devices)
    return {option: value for option, value in sorted(given.items()) if value is not None}


def _container_options(job: Job, cluster: Cluster) -> list[str]:
    """srun's pyxis options; the environment's names, so that its values win over those baked into the image."""
    if cluster.image is None:
        return []
    workdir = workdir_on_nodes(cluster)
    return [
        f"--container-image={cluster.image}",
        "--container-mounts=" + ",".join([f"{workdir}:{workdir}", *cluster.mounts]),
        f"--container-workdir={workdir}",
        "--container-env=" + ",".join([*rank_environment(job, cluster), "MASTER_ADDR", "MASTER_PORT"]),
    ]
