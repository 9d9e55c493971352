"""Runs of `launch.py` on the corpus in corpora/mine, for tests that compare two of them step by step."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, float]


def train(folder: Path, name: str, *words: str, saved: int, last: int) -> tuple[dict[int, Row], str]:
    """Train to step `last` in `folder`, with checkpoints at `saved` and `last`.

    Returns:
        the row of metrics.jsonl of each step that it trained, and what it printed.
    """
    numbers = (f"trainer.max_steps={last}", f"trainer.val_check_interval={last}", "trainer.limit_val_batches=1")
    saves = (f"log.ckpt.every_n_train_steps={saved}", "log.ckpt.keep_last=3", "trainer.log_every_n_steps=1")
    corpus = (f"data.paths={ROOT / 'corpora/mine'}", f"data.index_mapping_dir={folder / 'index'}")
    command = [sys.executable, str(ROOT / "launch.py"), "--name", name, *numbers, *saves, *corpus, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, rows) if "loss" in row}, done.stdout + done.stderr


def validation_loss(folder: Path, name: str, step: int) -> float:
    """The validation loss of a run at a step, in nats per token."""
    rows = map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    return float(next(row["val_loss"] for row in rows if "validation" in row and row["step"] == step))


def copy_without_end(folder: Path, original: str, name: str, last: int) -> Path:
    """Copy a run without the checkpoint of step `last`, so that it can be resumed; returns the copy's folder."""
    copy = folder / "runs" / name
    shutil.copytree(folder / "runs" / original, copy)
    shutil.rmtree(copy / f"checkpoints/step-{last}")
    (copy / "metrics.jsonl").unlink()
    return copy
