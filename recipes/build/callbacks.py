"""The callbacks slot."""

from __future__ import annotations

import nemo_run as run

from training.gates import TruthGates
from training.interrupt import StopOnInterrupt
from training.progress import Progress


def default() -> list[run.Config]:
    """Gates before step 1, progress and metrics during, a clean end on Ctrl-C."""
    return [run.Config(TruthGates), run.Config(Progress), run.Config(StopOnInterrupt)]
