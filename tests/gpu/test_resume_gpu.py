"""A run on a GPU that is resumed goes on where the whole one was, with every lever on.

pytest tests/gpu     (a prepared corpus in corpora/mine)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SAVED, LAST = 40, 60

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not (ROOT / "corpora/mine").is_dir(), reason="no corpus in corpora/mine"),
]


def losses(folder: Path, name: str, *words: str) -> dict[int, float]:
    """Run `launch.py` with these words; loss of each step that it trained."""
    numbers = (f"trainer.max_steps={LAST}", f"trainer.val_check_interval={LAST}", "trainer.limit_val_batches=1")
    saves = (f"log.ckpt.every_n_train_steps={SAVED}", "log.ckpt.keep_last=3", "trainer.log_every_n_steps=1")
    corpus = (f"data.paths={ROOT / 'corpora/mine'}", f"data.index_mapping_dir={folder / 'index'}")
    command = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_500m_single", "--name", name]
    done = subprocess.run(
        [*command, *numbers, *saves, *corpus, *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "captured one micro batch" in done.stdout + done.stderr
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, rows) if "loss" in row}


def test_resume_with_the_levers_on(tmp_path: Path) -> None:
    """The five steps after the checkpoint, within 2e-3: weights, moments, step count and data order are restored.

    Later steps amplify what atomics in the backward pass round differently, as two whole runs do.
    """
    whole = losses(tmp_path, "whole")
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/resumed")
    shutil.rmtree(tmp_path / f"runs/resumed/checkpoints/step-{LAST}")
    (tmp_path / "runs/resumed/metrics.jsonl").unlink()
    resumed = losses(tmp_path, "resumed", "--resume")
    assert min(resumed) == SAVED + 1
    again = losses(tmp_path, "again")
    for step in range(SAVED + 1, LAST + 1):
        print(step, whole[step], resumed[step] - whole[step], again[step] - whole[step])
    for step in range(SAVED + 1, SAVED + 6):
        assert resumed[step] == pytest.approx(whole[step], abs=2e-3), step
