"""`--executor slurm` on a real Slurm: two nodes, a failing job, a preempted job that saves, requeues and resumes."""

from __future__ import annotations

import time

from tests.cluster.conftest import Slurm


def test_up(slurm: Slurm) -> None:
    began = time.monotonic()
    assert slurm("srun", "-N2", "-n2", "sh", "-c", "echo $SLURM_PROCID").split() in (["0", "1"], ["1", "0"])
    print(time.monotonic() - began)
