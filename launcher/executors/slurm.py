"""`slurm`: NeMo-Run's SlurmExecutor renders the batch script, its tunnel carries it, Slurm runs one task for each rank.

NeMo-Run's own submission is not used: it asks slurmdbd for a job's state, which many clusters do not have, ends with
exit code 0 when the job failed, and packages the code under /nemo_run, which exists in pyxis containers only.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from launcher.cluster_file import Cluster, Ssh
from launcher.executors import Job
from launcher.executors.on_cluster import checked, workdir_of
from launcher.executors.slurm_render import render
from launcher.executors.slurm_watch import Submitted, follow
from launcher.executors.tunnel import open_tunnel, run

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

log = logging.getLogger("launch")


def submit(job: Job) -> int:
    """Render, submit, say how to follow, cancel and resume, and (unless `wait: false`) follow to the end.

    Returns:
        0, or the first failed rank's exit code; 130 if the following was stopped by Ctrl-C (the job runs on).

    Raises:
        UserError: no cluster file, a name that Slurm cannot take, a job of this run that still waits or runs, or
            what sbatch itself has to say.
    """
    cluster = checked(job)
    scripts = job.folder.path / "slurm"
    target = target_of(cluster, job)
    script = render(job, cluster, target)
    scripts.mkdir(parents=True, exist_ok=True)
    path = scripts / f"{job.folder.name}.sbatch"
    path.write_text(script)
    if job.dryrun:
        log.info("slurm: would submit %s:\n%s", path, script)
        return 0
    tunnel = open_tunnel(cluster)
    _refuse_second(tunnel, scripts / "job.txt", job)
    _ship(tunnel, cluster, job, path, target)
    submitted = Submitted(_sbatch(tunnel, cluster, job, f"{target}/{path.name}"), job, cluster, target)
    (scripts / "job.txt").write_text(submitted.job_id + "\n")
    _tell(submitted)
    return follow(tunnel, submitted) if cluster.wait else 0


def target_of(cluster: Cluster, job: Job) -> str:
    """Where the batch script and Slurm's own logs lie, as Slurm sees it (relative to workdir unless job_dir is set)."""
    if isinstance(cluster.tunnel, Ssh) and cluster.tunnel.job_dir:
        return f"{cluster.tunnel.job_dir}/{job.folder.name}"
    return f"{job.folder.path}/slurm"


def _refuse_second(tunnel: Tunnel, record: Path, job: Job) -> None:
    """Two jobs on one run directory would write each other's checkpoints."""
    if not record.exists():
        return
    job_id = record.read_text().strip()
    state = run(tunnel, ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]).stdout.strip()
    if state:
        raise UserError(
            f"run {job.folder.name} has a job already",
            expected="no job of this run in the queue",
            found=f"job {job_id}, {state}",
            do=f"scancel {job_id}, or --name ANOTHER",
        )


def _ship(tunnel: Tunnel, cluster: Cluster, job: Job, script: Path, target: str) -> None:
    """Over ssh: what the launcher wrote, to the checkout there. Locally everything lies there already."""
    if not isinstance(cluster.tunnel, Ssh):
        return
    there = f"{workdir_of(cluster)}/{job.folder.path}"
    folder = target if target.startswith("/") else f"{workdir_of(cluster)}/{target}"
    made = run(tunnel, ["mkdir", "-p", there, folder])
    if not made.ok:
        raise UserError("cannot write on the cluster", expected=there, found=made.stderr.strip(), do="correct workdir")
    for path in job.folder.written:
        tunnel.put(str(path), f"{there}/{path.name}")
    tunnel.put(str(script), f"{folder}/{script.name}")


def _sbatch(tunnel: Tunnel, cluster: Cluster, job: Job, script: str) -> str:
    """Submit; returns the job id."""
    requeue = "--requeue" if cluster.slurm.requeue else "--no-requeue"
    folder = workdir_of(cluster)
    where = script if script.startswith("/") else f"{folder}/{script}"
    done = run(tunnel, ["sbatch", "--parsable", requeue, "--chdir", folder, where])
    job_id = str(done.stdout).strip().split(";")[0]
    if not done.ok or not job_id.isdigit():
        raise UserError(
            "Slurm refused the job",
            expected="a job id",
            found=" ".join((done.stderr or done.stdout).split()),
            do="correct the cluster file: `sinfo` lists partitions, `sacctmgr show assoc` your accounts",
        )
    return job_id


def _tell(submitted: Submitted) -> None:
    job = submitted.job
    log.info("submitted: Slurm job %s, %d node(s) x %d rank(s)", submitted.job_id, job.num_nodes, job.devices)
    log.info("logs:      %s (each rank), %s (Slurm's)", job.logs, submitted.logs)
    log.info("cancel:    %s", submitted.command(["scancel", submitted.job_id]))
    log.info("resume:    %s (after a requeue the job resumes by itself)", job.resume_command)
