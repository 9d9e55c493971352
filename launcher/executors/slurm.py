"""`slurm`: submit the batch script of slurm.sbatch.j2, here or through NeMo-Run's ssh tunnel; one task per rank.

NeMo-Run's own submission is not used: nemo_run 0.4.0 asks slurmdbd for a job's state, which many clusters do not have,
ends with exit code 0 when the job failed, and packages the code under /nemo_run, which exists in pyxis containers only.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from common import processes
from common.commands import launch_command
from common.errors import UserError
from common.files import write_atomic
from common.spec import RunSpec
from launcher.cluster_file import Cluster, Ssh
from launcher.executors import Job
from launcher.executors.on_cluster import check_names, workdir_on_nodes
from launcher.executors.slurm_render import render
from launcher.executors.slurm_watch import Submitted, follow
from launcher.executors.tunnel import open_tunnel, run_command

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

log = logging.getLogger("launch")


def submit(job: Job) -> int:
    """Submit the run, log how to follow, cancel and resume it, and (unless `wait: false`) follow it to its end.

    Returns:
        0, or the exit code of the rank that failed first; 130 if Ctrl-C ended the following (the job continues).

    Raises:
        UserError: a name that Slurm cannot take, a job of this run that is queued or running, a run of this name (or
            nothing to resume) on the other side of ssh, or sbatch's own refusal.
    """
    cluster = check_names(job)
    if job.dryrun:
        script = _write_script(job, cluster)
        log.info("slurm: would submit %s:\n%s", script, script.read_text())
        return 0
    tunnel = open_tunnel(cluster)
    record = _folder(job) / "job.txt"
    _check_not_queued(tunnel, record, job)
    if isinstance(cluster.tunnel, Ssh):
        job = _find_attempt(tunnel, cluster, job)
    script = _write_script(job, cluster)
    if isinstance(cluster.tunnel, Ssh):
        _copy_run_files(tunnel, cluster, job, script)
    logs = logs_folder(cluster, job)
    with processes.defer_stop_signals():  # a job that Slurm has accepted is recorded and shown
        submitted = Submitted(_run_sbatch(tunnel, cluster, f"{logs}/{script.name}"), job, cluster, logs)
        record.write_text(submitted.job_id + "\n")
        _log_submission(submitted)
    return follow(tunnel, submitted) if cluster.wait else 0


def check(job: Job) -> None:
    """Check that the cluster file allows the run and its retries, and that Slurm takes its names.

    Raises:
        UserError: it does not.
    """
    cluster = check_names(job)
    workdir_on_nodes(cluster)
    if job.resolved is not None and job.resolved.spec.retries and not cluster.slurm.requeue:
        raise UserError(
            "--retries: this cluster file lets no job return to the queue",
            expected="slurm: {requeue: true}, which is the default: Slurm starts a failed job again by requeueing it",
            found="requeue: false",
            do="remove that line of the cluster file, or --retries 0",
        )


def logs_folder(cluster: Cluster, job: Job) -> str:
    """Where Slurm finds the batch script and writes its own logs: relative to workdir, unless job_dir is set."""
    if isinstance(cluster.tunnel, Ssh) and cluster.tunnel.job_dir:
        return f"{cluster.tunnel.job_dir}/{job.folder.name}"
    return str(_folder(job))


def _folder(job: Job) -> Path:
    return job.folder.path / "slurm"


def _write_script(job: Job, cluster: Cluster) -> Path:
    path = _folder(job) / f"{job.folder.name}.sbatch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(job, cluster, logs_folder(cluster, job)))
    return path


def _check_not_queued(tunnel: Tunnel, record: Path, job: Job) -> None:
    """Two jobs of one run directory would overwrite each other's checkpoints.

    Raises:
        UserError: the job that was submitted last is still queued or running.
    """
    if not record.exists():
        return
    job_id = record.read_text().strip()
    state = run_command(tunnel, ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]).stdout.strip()
    if state:
        raise UserError(
            f"run {job.folder.name} has a job already",
            expected="no job of this run in the queue",
            found=f"job {job_id}, {state}",
            do=f"scancel {job_id}, or --name ANOTHER",
        )


def _find_attempt(tunnel: Tunnel, cluster: Cluster, job: Job) -> Job:
    """The job with the number of its attempt, which only the run directory behind ssh tells.

    Raises:
        UserError: a new run whose name is in use there, or a run to resume that has no checkpoint there.
    """
    spec, there = job.folder.spec(), f"{workdir_on_nodes(cluster)}/{job.folder.path}"

    def find(folder: str, *words: str) -> list[str]:
        return str(run_command(tunnel, ["find", f"{there}/{folder}", *words]).stdout).split("\n")[:-1]

    found = find("checkpoints", "-path", "*/step-*/weights/metadata.json")
    checkpoints = [path for path in found if re.search(r"/step-[0-9]+/weights/", path)]
    if checkpoints and not spec.resume:
        for path in filter(Path.is_file, job.folder.written):  # this launch has overwritten that run's record
            tunnel.get(f"{there}/{path.name}", str(path))
        raise UserError(
            f"{job.folder.path} on the cluster holds a run already",
            expected="a name that is not in use there",
            found=f"{len(checkpoints)} checkpoint(s) in {there}",
            do=f"--name ANOTHER for a new run, or `{job.resume_command}` to continue it",
        )
    if spec.resume and not checkpoints:
        raise UserError(
            f"nothing to resume in {job.folder.path} on the cluster",
            expected=f"a complete checkpoint under {there}/checkpoints",
            found="none",
            do=f"start it anew: {launch_command('--config', str(job.folder.run_file))}",
        )
    folders = find("logs", "-maxdepth", "1", "-name", "attempt-*")
    attempts = [int(match[1]) for path in folders if (match := re.search(r"/attempt-([0-9]+)$", path))]
    spec = dataclasses.replace(spec, attempt=max(attempts, default=0) + 1)
    if spec.resume:  # the ranks have recorded the batch that they fitted to their GPUs
        recorded = RunSpec.from_json(run_command(tunnel, ["cat", f"{there}/spec.json"]).stdout).overrides
        fitted = [word for word in recorded if word not in spec.overrides]
        spec = dataclasses.replace(spec, overrides=(*fitted, *spec.overrides))
    write_atomic(job.folder.spec_file, spec.to_json())
    return dataclasses.replace(job, logs=job.folder.attempt(spec.attempt))


def _copy_run_files(tunnel: Tunnel, cluster: Cluster, job: Job, script: Path) -> None:
    """Copy what the launcher has written to the checkout behind ssh.

    Raises:
        UserError: the folders cannot be made there.
    """
    workdir, logs = workdir_on_nodes(cluster), logs_folder(cluster, job)
    there = f"{workdir}/{job.folder.path}"
    folder = logs if logs.startswith("/") else f"{workdir}/{logs}"
    made = run_command(tunnel, ["mkdir", "-p", there, folder])
    if not made.ok:
        raise UserError("cannot write on the cluster", expected=there, found=made.stderr.strip(), do="correct workdir")
    for path in filter(Path.is_file, job.folder.written):
        tunnel.put(str(path), f"{there}/{path.name}")
    tunnel.put(str(script), f"{folder}/{script.name}")


def _run_sbatch(tunnel: Tunnel, cluster: Cluster, script: str) -> str:
    """Submit the script.

    Returns:
        the job id.

    Raises:
        UserError: Slurm refuses it.
    """
    requeue = "--requeue" if cluster.slurm.requeue else "--no-requeue"
    workdir = workdir_on_nodes(cluster)
    path = script if script.startswith("/") else f"{workdir}/{script}"
    done = run_command(tunnel, ["sbatch", "--parsable", requeue, "--chdir", workdir, path])
    job_id = str(done.stdout).strip().split(";")[0]
    if not done.ok or not job_id.isdigit():
        raise UserError(
            "Slurm refused the job",
            expected="a job id",
            found=" ".join((done.stderr or done.stdout).split()),
            do="correct the cluster file: `sinfo` lists partitions, `sacctmgr show assoc` your accounts",
        )
    return job_id


def _log_submission(submitted: Submitted) -> None:
    job = submitted.job
    log.info("submitted: Slurm job %s, %d node(s) x %d rank(s)", submitted.job_id, job.num_nodes, job.devices)
    log.info("logs:      %s (each rank), %s (Slurm's)", job.logs, submitted.log_files)
    log.info("cancel:    %s", submitted.command_from_here(["scancel", submitted.job_id]))
    log.info("resume:    %s (after a requeue the job resumes by itself)", job.resume_command)
