"""`direct`: the one rank is the launcher's own process."""

from __future__ import annotations

from launcher import rank_main
from launcher.executors import Job


def submit(job: Job) -> int:
    """Train in this process."""
    if job.dryrun:
        return 0
    assert job.resolved is not None
    return rank_main.train(job.folder, job.resolved, built=job.built)
