"""`direct`: the one rank is the launcher's own process; with --retries it is a process that the launcher watches."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys

from common import processes, rank_states
from common.commands import python_path
from launcher import rank_main
from launcher.executors import Job
from launcher.executors.follow import Follower
from launcher.executors.signals import CTRL_C, ForwardSignals
from launcher.rank_watch import RankWatch

log = logging.getLogger("launch")


def submit(job: Job) -> int:
    """Train in this process, or in a child process that can be started again when it is killed."""
    if job.dryrun:
        return 0
    assert job.resolved is not None
    if job.resolved.spec.retries:
        return _train_in_child(job)
    return rank_main.train(job.folder, job.resolved, built=job.built)


def _train_in_child(job: Job) -> int:
    """Start the rank as a process of its own and show its lines until it ends.

    Returns:
        its exit code.
    """
    processes.name_launcher()
    command = [sys.executable, *job.rank_command[1:]]
    job.logs.mkdir(parents=True, exist_ok=True)
    own = job.logs / "rank.log"
    with own.open("a") as output, Follower(job.logs / "console.log"):
        environment = {**os.environ, "PYTHONPATH": python_path()}
        rank = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        forward = ForwardSignals(lambda count: rank.send_signal(CTRL_C if count < 3 else signal.SIGKILL))
        with forward, RankWatch(job.logs):
            rank.wait()
    return rank_states.log_outcome(job.logs, 1, own, rank.returncode, asked=forward.asked)
