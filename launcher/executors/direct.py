"""`direct`: the one rank is the launcher's own process."""

from __future__ import annotations

from launcher import rank_main as rank
from launcher.executors import Job


def submit(job: Job) -> int:
    """Train in this process."""
    return 0 if job.dryrun else rank.train(job.folder)
