"""The callbacks slot."""

from __future__ import annotations

import nemo_run as run

from runtime.gates import TruthGates
from runtime.interrupt import StopOnInterrupt
from runtime.progress import Progress


def default() -> list[run.Config]:
    """Gates before step 1, progress and metrics during, a clean end on Ctrl-C."""
    return [run.Config(TruthGates), run.Config(Progress), run.Config(StopOnInterrupt)]
