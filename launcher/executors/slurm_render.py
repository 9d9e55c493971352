"""The batch script: NeMo-Run's template, with what NeMo-Run 0.4.0 gets wrong put right."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cluster_file import Cluster
from launcher.executors import Job
from launcher.executors.on_cluster import exported, python_of, workdir_of

if TYPE_CHECKING:
    from nemo_run.core.execution.slurm import SlurmBatchRequest, SlurmExecutor

log = logging.getLogger("launch")
_CODE = Path(__file__).resolve().parents[2]  # the launcher's own checkout: ranks started elsewhere run the same


def render(job: Job, cluster: Cluster, target: str) -> str:
    """The batch script of `job`.

    Args:
        target: folder of Slurm's own logs, made of characters that need no quotes.
    """
    python = python_of(cluster)
    command = shlex.join([python, *job.rank_command[1:]])
    return str(_request(job, cluster, target, command, workdir_of(cluster)).materialize())


def _request(job: Job, cluster: Cluster, target: str, command: str, workdir: str) -> SlurmBatchRequest:
    """NeMo-Run's request, whose script names only containers that exist and quotes every word.

    Two faults of nemo_run 0.4.0 (tests/launcher/executors/test_slurm_render.py fails without this class):
    SlurmBatchRequest.materialize always gives srun --container-mounts and --container-workdir, which Slurm without
    pyxis rejects, and a working folder /nemo_run/code, which only its own packaging makes (NeMo issue 12615); and
    `noquote` is an alias of str, so that isinstance is always true and no word of the srun line is ever quoted.
    """
    from nemo_run.core.execution.slurm import SlurmBatchRequest

    executor = _executor(job, cluster, target)
    stock = f" --container-mounts {target}:/nemo_run --container-workdir /nemo_run/code"

    class Request(SlurmBatchRequest):  # type: ignore[misc]
        def materialize(self) -> str:
            script = super().materialize()
            if script.count(stock) != 1:
                raise AssertionError("nemo_run renders srun in another way than 0.4.0: look at slurm_render.py")
            return str(script.replace(stock, _container(job, cluster, workdir)))

    return Request(
        cmd=["sbatch", "--parsable"],
        jobs=[job.folder.name],
        command_groups=[[command]],
        slurm_config=executor,
        max_retries=0,  # a failed run fails again; only a stopped one is worth another start
        extra_env={},
    )


def _executor(job: Job, cluster: Cluster, target: str) -> SlurmExecutor:
    from nemo_run.core.execution.slurm import SlurmExecutor, SlurmJobDetails
    from nemo_run.core.packaging.base import Packager
    from nemo_run.core.tunnel.client import LocalTunnel

    extra = dict(cluster.slurm.sbatch)
    chosen_gpus = {"gres", "gpus", "gpus-per-node", "gpus-per-task"} & set(extra)
    own_gpus = job.devices if job.accelerator == "gpu" and not chosen_gpus else None
    if own_gpus:
        log.info("slurm: gpus-per-node=%d (one a rank; sbatch: {gres: ...} in the cluster file changes it)", own_gpus)
    tunnel = LocalTunnel(job_dir=str(Path(target).parent))
    return SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        job_name_prefix="run.",  # without one it takes the account apart, which may be none
        time=cluster.time,
        nodes=job.num_nodes,
        ntasks_per_node=job.devices,
        gpus_per_node=own_gpus,
        signal=f"TERM@{cluster.slurm.stop_before_end_s}" if cluster.time else None,
        additional_parameters=extra,
        srun_args=[shlex.quote(word) for word in cluster.slurm.srun],
        job_details=SlurmJobDetails(job_name=job.folder.name, folder=target),
        tunnel=tunnel,
        packager=Packager(),
        setup_lines=_setup(job, cluster),
        job_dir=target,
    )


def _container(job: Job, cluster: Cluster, workdir: str) -> str:
    """srun's pyxis options; the environment's names, so that ours win over those baked into the image."""
    if cluster.image is None:
        return ""
    mounts = ",".join([f"{workdir}:{workdir}", *cluster.mounts])
    names = ",".join([*exported(job, cluster), "MASTER_ADDR", "MASTER_PORT"])
    options = [f"--container-image={cluster.image}", f"--container-mounts={mounts}"]
    options += [f"--container-workdir={workdir}", f"--container-env={names}"]
    return " " + shlex.join(options)


def _setup(job: Job, cluster: Cluster) -> str:
    """Shell lines before srun: environment, meeting point, and what happens after a stop.

    NeMo-Run's own env_vars are not used: 0.4.0 upper-cases their names and leaves their values unquoted.
    """
    first = int(job.logs.name.rsplit("-", 1)[-1])
    attempts = shlex.quote(f"{job.folder.path}/logs/attempt-")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exported(job, cluster).items()]
    if cluster.workdir is None and workdir_of(cluster) != str(_CODE):
        lines.append(f"export PYTHONPATH={shlex.quote(str(_CODE))}${{PYTHONPATH:+:$PYTHONPATH}}")
    lines += [
        "# the address by which Slurm itself reaches the first node, and a port of this job's own",
        'MASTER_ADDR=$(scontrol --oneliner show node "$head_node" | sed -n "s/.* NodeAddr=\\([^ ]*\\) .*/\\1/p")',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))",
        "export MASTER_ADDR MASTER_PORT",
        "# since Slurm 22.05 srun takes this from nowhere else",
        'if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"; fi',
    ]
    if cluster.slurm.requeue:
        lines += [
            "# ranks that were asked to stop (time limit, preemption) have saved: back into the queue, to resume;",
            "# scancel signals this shell too, and is the end",
            "cancelled=0",
            "trap 'cancelled=1' TERM",
            "requeue_if_stopped() {",
            "  code=$?",
            f"  attempt={attempts}$(({first} + ${{SLURM_RESTART_COUNT:-0}}))",
            '  if [ "$code" -ne 0 ] && [ "$cancelled" = 0 ] &&',
            '    grep -qs \'"state": "interrupted"\' "$attempt"/rank-*.json; then',
            '    echo "stopped and saved: job $SLURM_JOB_ID goes back to the queue"',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "  fi",
            "}",
            "trap requeue_if_stopped EXIT",
        ]
    return "\n".join(lines)
