"""A run that is evaluated while it trains: the same losses, the results in its records, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import rank_states
from common.checkpoint_files import copy_by_links
from common.processes import is_alive
from common.rank_states import RankState
from common.run_status import read_status
from common.rundir import RunDir
from report.evaluation import harness
from report.evaluation.result import newest_evaluation
from tests.training.conftest import SHORT, train
from training import evaluation
from training.evaluation import EvaluateCheckpoints

pytestmark = pytest.mark.nemo
ROOT = Path(__file__).resolve().parents[2]
STEPS = (*SHORT, "trainer.max_steps=6", "log.ckpt.every_n_train_steps=3", "log.ckpt.keep_last=1")


def test_losses_are_those_of_a_run_without_evaluation(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    if not harness.is_installed():
        pytest.skip("the lm-evaluation-harness is not installed")
    (tmp_path / "off").mkdir()
    off = forked(train, sample, *STEPS, cwd=tmp_path / "off")
    words = ("evaluate.every_n_steps=3", "evaluate.limit=2", "evaluate.tasks=bits")
    on = forked(train, sample, *STEPS, *words)
    assert [row["loss"] for row in on if "loss" in row] == [row["loss"] for row in off if "loss" in row]
    run = tmp_path / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [row for row in rows if "evaluation" in row]
    assert [row["step"] for row in evaluated] == [3, 6]
    assert all("bits_prose/bits_per_byte" in row["evaluation"] for row in evaluated)
    assert evaluated[0]["evaluation"] != evaluated[1]["evaluation"]
    # step 3 was deleted by the run, in mid-evaluation or before it, and its copy is gone too
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step-6"]
    assert not (run / "evaluating").exists()
    newest = newest_evaluation(RunDir.at(run))
    assert newest is not None and newest.step == 6 and newest.model == "runs/run/checkpoints/step-6"
    # services are told of the end after the last result, and TensorBoard has it too
    status = read_status(run / "status.json")
    assert status is not None and status.ending is not None and evaluated[-1]["time"] <= status.ending.time
    assert _read_curve(run / "tb", "evaluation_bits_prose/bits_per_byte") == {
        row["step"]: pytest.approx(row["evaluation"]["bits_prose/bits_per_byte"]) for row in evaluated
    }


def _read_curve(folder: Path, name: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[int, float] = {}
    for file in folder.rglob("events.*"):
        events = EventAccumulator(str(file)).Reload()
        points |= {one.step: one.value for one in events.Scalars(name)} if name in events.Tags()["scalars"] else {}
    return points


def test_a_copy_survives_its_source_and_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "step-1" / "weights"
    source.mkdir(parents=True)
    (source / "part").write_text("weights")
    copy = copy_by_links(source.parent, tmp_path / "evaluating" / "step-1")
    assert (copy / "weights/part").stat().st_ino == (source / "part").stat().st_ino
    (source / "part").unlink()
    assert (copy / "weights/part").read_text() == "weights"

    def no_links(*_: Any) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", no_links)
    again = copy_by_links(copy, tmp_path / "again")
    assert (again / "weights/part").read_text() == "weights"


def test_an_evaluation_that_hangs_or_fails_costs_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes too long is killed; the next checkpoint is then evaluated; a failure is a warning."""
    run = tmp_path / "runs" / "mine"
    started: list[Any] = []
    real = subprocess.Popen

    def slow(*_: Any, **options: Any) -> Any:
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], stdout=options["stdout"]))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", slow)
    callback = EvaluateCheckpoints(every_n_steps=5, minutes=0.005, run_dir=str(run))
    for step in (5, 10, 15):
        folder = run / "checkpoints" / f"step-{step}" / "weights"
        folder.mkdir(parents=True)
        callback.on_complete(folder.parent)
    assert len(started) == 1 and sorted(p.name for p in (run / "evaluating").iterdir()) == ["step-15", "step-5"]
    callback.finish()
    assert len(started) == 2 and not any(is_alive(process.pid) for process in started)
    assert list((run / "evaluating").iterdir()) == []


def _save(run: Path, step: int) -> Path:
    """A folder that counts as a complete checkpoint."""
    folder = run / "checkpoints" / f"step-{step}"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "metadata.json").write_text("{}")
    return folder


def _evaluate_at_once(callback: EvaluateCheckpoints, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The evaluations end as soon as they start; returns the names of what they read."""
    read: list[str] = []

    def quick(command: list[str], **_: Any) -> Any:
        read.append(next(word for word in command if "/evaluating/" in word).rpartition("/")[2])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "Popen", quick)
    monkeypatch.setattr(subprocess.CompletedProcess, "poll", lambda self: self.returncode, raising=False)
    return read


def test_the_last_checkpoint_is_evaluated_wherever_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """trainer.max_time ends a run at any step."""
    run = tmp_path / "runs" / "mine"
    callback = EvaluateCheckpoints(every_n_steps=4, run_dir=str(run))
    read = _evaluate_at_once(callback, monkeypatch)
    for step in (2, 4, 6, 7):
        callback.on_complete(_save(run, step))
        callback.poll()
    assert read == ["step-4"]
    callback.finish()
    assert read == ["step-4", "step-7"]


def test_only_its_own_copies_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    callback = EvaluateCheckpoints(every_n_steps=4, run_dir=str(run))
    other = run / "evaluating" / "step-8"  # of another rank, or of a later attempt
    other.mkdir(parents=True)
    callback._waiting = copy_by_links(_save(run, 4), run / "evaluating" / "step-4")
    callback.stop()
    assert list((run / "evaluating").iterdir()) == [other]


def test_other_ranks_stay_until_rank_0_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun ends rank 0 a minute after the others have left."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            RankState(rank=0, state=rank_states.DONE).write(tmp_path)

    monkeypatch.setattr(time, "sleep", sleep)
    for rank in (0, 1):
        RankState(rank=rank).write(tmp_path)
    evaluation.wait_for_rank_0(tmp_path, minutes=30)
    assert len(waits) == 3
    RankState(rank=0).write(tmp_path)  # it never ends
    monkeypatch.setattr(time, "sleep", lambda _: monkeypatch.setattr(time, "monotonic", lambda: 1e12))
    evaluation.wait_for_rank_0(tmp_path, minutes=30)


def test_an_evaluation_ends_with_its_rank(tmp_path: Path) -> None:
    """The rank is killed; the process that it has started is gone with it."""
    program = tmp_path / "program.py"
    program.write_text("import os, time; print(os.getpid(), os.nice(0), flush=True); time.sleep(60)")
    parent = (
        "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-m', 'common.run_beside',"
        f" str(os.getpid()), {str(program)!r}]); time.sleep(60)"
    )
    rank = subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid, nice = map(int, rank.stdout.readline().split())
    assert nice == 19 and is_alive(pid)
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
