"""SIGKILL at random moments, half of them during a save: every resume works, and the end is bit-identical.

`KILLS=20 pytest tests/training/test_kill.py` is the full exercise; by default there are a few kills.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.rundir import RunDir
from tests.training.conftest import SHORT, train

pytestmark = [pytest.mark.nemo, pytest.mark.slow]

KILLS = int(os.environ.get("KILLS", "4"))
STEPS = 10 * (KILLS + 2)
WORDS = (*SHORT, f"trainer.max_steps={STEPS}", "log.ckpt.every_n_train_steps=5", "log.ckpt.keep_last=2")


def _weights(checkpoint: Path) -> dict[str, str]:
    """Name -> SHA-256 of each tensor, optimizer state included."""
    from megatron.core import dist_checkpointing

    from training import cpu

    with cpu.emulate_cuda():
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        tensors = dist_checkpointing.load_plain_tensors(str(checkpoint / "weights"))
    kept = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in kept.items()}


def _attempt(sample: Path, folder: Path, resume: bool) -> None:
    os.setpgrp()  # the processes of an async save die with it
    os.chdir(folder)
    train(sample, *WORDS, resume=resume)
    os._exit(0)


def _kill_once(sample: Path, folder: Path, in_save: bool, rng: random.Random) -> bool:
    """Start or resume the run, kill it; True if that was during a save."""
    checkpoints = folder / "runs" / "run" / "checkpoints"
    resume = (
        any(p.name.startswith("step-") and p.is_dir() for p in checkpoints.glob("*")) if checkpoints.exists() else False
    )
    if not resume and checkpoints.parent.exists():
        raise AssertionError("killed before the first checkpoint: the test's timing is off")
    run = multiprocessing.get_context("fork").Process(target=_attempt, args=(sample, folder, resume))
    before = {p.name for p in checkpoints.glob("step-*")} if checkpoints.exists() else set()
    run.start()
    assert run.pid is not None
    while run.is_alive():  # at least one new complete checkpoint, so that the test moves on
        new = {p.name for p in checkpoints.glob("step-*") if not p.name.endswith("-unfinished")} - before
        markers = {m.name.removesuffix("-unfinished") for m in checkpoints.glob("step-*-unfinished")}
        if new - markers:
            break
        time.sleep(0.005)
    deadline = time.monotonic() + rng.uniform(0.0, 1.0)
    while run.is_alive() and time.monotonic() < deadline + (30 if in_save else 0):
        if in_save and time.monotonic() > deadline and list(checkpoints.glob("step-*-unfinished")):
            time.sleep(rng.uniform(0, 0.15))
            break
        time.sleep(0.001)
    unfinished = bool(list(checkpoints.glob("step-*-unfinished")))
    if run.is_alive():
        os.killpg(run.pid, signal.SIGKILL)
    run.join()
    return unfinished


def test_kills(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    rng = random.Random(7)
    (tmp_path / "uninterrupted").mkdir()
    killed = tmp_path / "killed"
    killed.mkdir()
    expected_rows = forked(train, sample, *WORDS, cwd=tmp_path / "uninterrupted")
    during = sum(_kill_once(sample, killed, in_save=index % 2 == 0, rng=rng) for index in range(KILLS))
    rows = forked(lambda: train(sample, *WORDS, resume=True), cwd=killed)
    print(f"{KILLS} kills, {during} of them during a save")
    assert during >= KILLS // 4
    assert [p.name for p in RunDir("run", killed / "runs").complete_checkpoints()] == [
        f"step-{STEPS - 5}",
        f"step-{STEPS}",
    ]
    last = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert last == {row["step"]: row["loss"] for row in expected_rows if "loss" in row}
    expected = forked(_weights, tmp_path / "uninterrupted/runs/run/checkpoints" / f"step-{STEPS}")
    found = forked(_weights, killed / "runs/run/checkpoints" / f"step-{STEPS}")
    assert any("exp_avg" in name for name in expected)
    assert found == expected
