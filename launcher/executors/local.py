"""`local`: NeMo-Run's LocalExecutor with torchrun, one rank per device here (NCCL on GPUs, Gloo on a CPU)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

from common import logs, processes, rank_states
from common.commands import python_path
from launcher.executors import Job
from launcher.executors.follow import Follower
from launcher.executors.signals import CTRL_C, ForwardSignals
from launcher.rank_watch import RankWatch
from training.distributed import rank_env

log = logging.getLogger("launch")


def submit(job: Job) -> int:
    """Start the ranks and show rank 0's lines until they end.

    Returns:
        0, or the exit code of the rank that failed first; 130 after Ctrl-C.
    """
    job.logs.mkdir(parents=True, exist_ok=True) if not job.dryrun else None
    command = ["torchrun", f"--nproc-per-node={job.devices}", "-m", *job.rank_command[2:]]
    if job.dryrun:
        log.info("local: would start %s", " ".join(command))
        return 0
    for line in _prepare_environment(job):
        log.info("local: %s", line)
    log.info("started:   %d ranks on this machine: %s", job.devices, " ".join(command))
    log.info("logs:      %s/rank-0.log to rank-%d.log", job.logs, job.devices - 1)
    log.info("cancel:    Ctrl-C (or kill %d) saves and stops; the second Ctrl-C stops at once", os.getpid())
    log.info("resume:    %s", job.resume_command)
    forward = ForwardSignals(lambda count: _signal_ranks(job, count))
    with Follower(job.logs / "console.log"), forward, RankWatch(job.logs):
        _run_torchrun(job)
        rank_states.wait_until_ended(job.logs)
    return rank_states.log_outcome(job.logs, job.world_size, _torchrun_log(job), asked=forward.asked)


def _prepare_environment(job: Job) -> list[str]:
    """Set what torchrun and the ranks need beside the environment set.

    Returns:
        a line for the log for each number that was chosen, with its reason.
    """
    rank_env.clear_rank_variables(os.environ)  # the ranks do not belong to a Slurm job or torchrun around this command
    path = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    os.environ["PATH"] = os.pathsep.join(path)  # NeMo-Run starts `torchrun` by name, also without an active venv
    os.environ["PYTHONPATH"] = python_path()
    os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")  # torchrun's --local-addr: this host's name may not resolve
    processes.name_launcher()
    if "OMP_NUM_THREADS" in os.environ:
        return []
    threads = max(1, (os.cpu_count() or 1) // job.devices)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return [f"OMP_NUM_THREADS={threads} ({os.cpu_count()} cores / {job.devices} ranks; torchrun would take 1)"]


def _run_torchrun(job: Job) -> None:
    """Start torchrun through NeMo-Run, and wait until all ranks have ended.

    nemo_run 0.4.0 reports a failed job as a success (run() returns None and leaves a file SUCCESS): the outcome is read
    from the states that the ranks record. Test: tests/launcher/executors/test_mpirun.py.
    """
    import nemo_run as run
    from nemo_run.core.frontend.console.api import CONSOLE
    from nemo_run.run.torchx_backend.schedulers import local as scheduler

    home = job.logs.absolute() / "torchrun"
    home.mkdir(parents=True, exist_ok=True)
    scheduler.LOCAL_JOB_DIRS = str(home / "jobs.json")  # default: a file in the home folder, which may be read-only
    CONSOLE.quiet = True
    executor = run.LocalExecutor(ntasks_per_node=job.devices, launcher="torchrun")
    ranks = run.Script(path=job.rank_command[2], m=True, entrypoint="python", args=list(job.rank_command[3:]))
    with run.Experiment("local", executor=executor, base_dir=str(home), log_level="ERROR") as experiment:
        experiment.add(ranks, name="ranks")
        experiment.run(detach=False)
    logs.log_to_console()  # an Experiment replaces the log handlers


def _torchrun_log(job: Job) -> Path | None:
    found = sorted((job.logs / "torchrun").rglob("stderr.log"))
    return found[-1] if found else None


def _signal_ranks(job: Job, count: int) -> None:
    """Signal the ranks themselves: torchrun would give them 30 s, and then kill them while they save."""
    known = rank_states.read(job.logs)
    if not known:
        log.warning("no rank has started yet")
        raise KeyboardInterrupt
    for state in known:
        if state.state == rank_states.RUNNING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state.pid, CTRL_C if count < 3 else signal.SIGKILL)
