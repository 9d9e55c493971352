"""The plan on a real GPU: its memory within 5% of the measured peak, its time within 10% of a run after calibration.

pytest tests/gpu     (a prepared corpus in corpora/mine)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.runs import ROOT, train

STEPS = 1500  # the start differs by 5 s from run to run: training must be most of what is forecast
NUMBERS = (
    "trainer.limit_val_batches=1",
    f"trainer.val_check_interval={STEPS}",
    f"log.ckpt.every_n_train_steps={STEPS}",
)

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not (ROOT / "corpora/mine").is_dir(), reason="no corpus in corpora/mine"),
]


def _plan(folder: Path, *words: str) -> dict[str, Any]:
    corpus = (f"data.paths={ROOT / 'corpora/mine'}", f"data.index_mapping_dir={folder / 'index'}")
    command = [sys.executable, str(ROOT / "launch.py"), "plan", "qwen25_500m_single", "--json", *words, *corpus]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


def test_the_run_takes_what_the_calibrated_plan_says(tmp_path: Path) -> None:
    words = (f"trainer.max_steps={STEPS}", *NUMBERS)
    estimate = _plan(tmp_path, *words)["memory_gib"]["reserved"]
    planned = _plan(tmp_path, *words, "--calibrate")
    start = time.time()
    rows, _ = train(tmp_path, "run", "--recipe", "qwen25_500m_single", *words, saved=STEPS, last=STEPS)
    seconds = time.time() - start
    measured = max(row["memory_gib"] for row in rows.values())
    took = planned["time"]["total_seconds"]
    print(f"memory {estimate:.2f} planned, {measured:.2f} GiB; time {took:.0f} planned, {seconds:.0f} s")
    assert estimate == pytest.approx(measured, rel=0.05)
    assert took == pytest.approx(seconds, rel=0.10)
