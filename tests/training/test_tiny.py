"""A small training run is reproducible, learns, resumes exactly and stops cleanly."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.manifest import load_manifest
from report.send.rows import read_new_points
from tests.fork_server import real_start
from tests.training.conftest import SHORT, train
from tests.training.stores import check_mlflow, check_wandb

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "losses" / "qwen25_tiny.json"


def _losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def test_reproducible_and_resumable(
    sample: Path, forked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_is_here: bool
) -> None:
    """The same seed gives the same losses to the last bit, also when a new process resumes after ten steps.

    The resumed run is sent to W&B (offline) and MLflow: their own readers find one run, with the numbers of
    metrics.jsonl, and the losses are those without loggers.
    """
    monkeypatch.setenv("NETRC", str(tmp_path / "no-key"))
    loggers = (f"log.loggers={'wandb+mlflow' if mlflow_is_here else 'wandb'}",)
    (tmp_path / "uninterrupted").mkdir()
    (tmp_path / "resumed").mkdir()
    steps = (*SHORT, "log.ckpt.every_n_train_steps=10")
    uninterrupted = forked(train, sample, *steps, "trainer.max_steps=20", cwd=tmp_path / "uninterrupted")
    first = forked(train, sample, *steps, *loggers, "trainer.max_steps=10", cwd=tmp_path / "resumed")
    resumed = forked(lambda: train(sample, *steps, "trainer.max_steps=20", resume=True), cwd=tmp_path / "resumed")
    assert len(_losses(uninterrupted)) == 20
    assert _losses(first) == _losses(uninterrupted)[:10]
    assert _losses(resumed) == _losses(uninterrupted)
    assert resumed[-1]["unmasked_tokens"] == uninterrupted[-1]["unmasked_tokens"] == 20 * 4 * 256
    assert all(0.1 < row["memory_gib"] < 100 for row in uninterrupted if "loss" in row)
    assert [p.name for p in sorted((tmp_path / "resumed/runs/run/checkpoints").iterdir())] == ["step-10", "step-20"]
    points = read_new_points(tmp_path / "resumed/runs/run/metrics.jsonl", 0)[0]
    check_wandb(tmp_path / "resumed/runs/run", points, attempts=2)
    if mlflow_is_here:
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        check_mlflow(tmp_path / "resumed/runs", points)


def test_mlflow_takes_part_in_the_comparison(mlflow_is_here: bool) -> None:
    """Where it is absent the test above compares W&B only: this line of the summary says so."""
    if not mlflow_is_here:
        pytest.skip("no MLflow: MLFLOW_FOLDER, a folder made from tests/mlflow.txt (.ci/run)")


def _continue_from(words: list[str]) -> list[dict[str, Any]]:
    import launch

    assert launch._run(words) == 0
    return [json.loads(line) for line in Path("runs/again/metrics.jsonl").read_text().splitlines()]


def test_a_new_run_from_an_older_checkpoint(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    """`resume RUN --from step-N --name NEW` gives the losses of the first run, which stays as it is."""
    steps = (*SHORT, "log.ckpt.every_n_train_steps=4", "trainer.max_steps=8")
    first = forked(train, sample, *steps)
    again = forked(_continue_from, ["resume", "run", "--from", "step-4", "--name", "again"])
    assert _losses(again) == _losses(first) and len(_losses(first)) == 8
    assert sorted(p.name for p in (tmp_path / "runs/run/checkpoints").iterdir()) == ["step-4", "step-8"]
    assert "again" not in (tmp_path / "runs/run/spec.json").read_text()


def test_losses_are_the_recorded_ones(sample: Path, forked: Callable[..., Any]) -> None:
    """A refactor must not change the losses. They are recorded by the corpus's hash, as each Python has other texts."""
    found = _losses(forked(train, sample, *SHORT, "trainer.max_steps=10"))
    corpus = load_manifest(sample / "prose").splits["train"].bin_sha256[:16]
    record = json.loads(GOLDEN.read_text())
    if os.environ.get("UPDATE_GOLDENS"):
        record[corpus] = found
        GOLDEN.write_text(json.dumps(record, indent=1) + "\n")
    if corpus not in record:
        pytest.skip(f"no recorded losses for corpus {corpus} (another Python's texts): UPDATE_GOLDENS=1 records them")
    assert found == pytest.approx(record[corpus], abs=2e-5)  # other CPUs sum in another order


@pytest.mark.slow
def test_it_learns(sample: Path, forked: Callable[..., Any]) -> None:
    losses = _losses(forked(train, sample, *SHORT, "trainer.max_steps=200"))
    assert losses[0] == pytest.approx(math.log(4096), abs=0.15)
    assert sum(losses[-20:]) / 20 < losses[0] - 2.0


def test_ctrl_c_saves_and_prints_the_command_to_resume(sample: Path, tmp_path: Path) -> None:
    """A real process and a real SIGINT: exit code 130, and the printed command resumes."""
    command = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--name", "stopped"]
    paths = [f"data.paths={sample / 'prose'}", f"data.index_mapping_dir={tmp_path / 'cache'}"]
    asked = [*command, *paths, "trainer.log_every_n_steps=1"]
    run = subprocess.Popen(asked, cwd=tmp_path, env=real_start(), stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    lines = []
    for line in run.stderr:
        lines.append(line)
        if "step 3/" in line:
            run.send_signal(signal.SIGINT)
            break
    rest = run.stderr.read()
    assert run.wait() == 130, rest
    assert "launch.py resume stopped" in rest
    steps = [p.name for p in (tmp_path / "runs/stopped/checkpoints").glob("step-*")]
    assert len(steps) == 1
    resume = [sys.executable, str(ROOT / "launch.py"), "resume", "stopped", "trainer.max_steps=8"]
    done = subprocess.run(resume, cwd=tmp_path, env=real_start(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resume with a change: trainer.max_steps: 400 -> 8" in done.stderr
    assert f"from runs/stopped/checkpoints/{steps[0]}" in done.stderr
    ours = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING) |  (expected|   found| do this): ")
    assert [line for line in done.stderr.splitlines() if not ours.match(line)] == []  # nothing of any library
    assert "loading NeMo" in done.stderr
    assert (tmp_path / "runs/stopped/checkpoints/step-8").is_dir()
