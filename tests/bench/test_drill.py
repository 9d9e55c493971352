"""Faults at random moments: the run ends with the weights of an undisturbed one.

`FAULTS=100 pytest tests/bench/test_drill.py` is the long exercise; by default there are a few.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from bench.drill import run_drill

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
FAULTS = int(os.environ.get("FAULTS", "4"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disturbed_run_ends_as_an_undisturbed_one(tmp_path: Path, sample: Path, ranks: int) -> None:
    (tmp_path / "corpora").symlink_to(sample)  # the drill builds it only where it is not
    options = argparse.Namespace(
        ranks=ranks,
        steps=20 + 4 * FAULTS,
        faults=FAULTS,
        minutes=60.0,
        seed=ranks,
        full_disk="FAULTS" in os.environ,
    )
    assert run_drill(tmp_path, options)
