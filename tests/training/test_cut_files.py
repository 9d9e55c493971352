"""A corpus file that is cut off while a run reads it is named."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import DiagnosedError
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def _train_and_cut(sample: Path) -> Any:
    shutil.copytree(sample / "prose", "corpora/prose")

    def cut() -> None:
        metrics = Path("runs/run/metrics.jsonl")
        while not metrics.exists() or '"step": 2,' not in metrics.read_text():
            time.sleep(0.01)
        os.truncate("corpora/prose/train.bin", 4096)

    threading.Thread(target=cut, daemon=True).start()
    return train(Path("corpora"), *SHORT, "data.num_workers=1")


def test_a_file_that_is_cut_off_under_a_data_worker_is_named(sample: Path, forked: Callable[..., Any]) -> None:
    """torch says that the shared memory may be too small."""
    with pytest.raises(DiagnosedError, match="train.bin is cut short, and was not when the run started"):
        forked(_train_and_cut, sample)
