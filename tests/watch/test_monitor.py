"""The monitor's page and its JSON, and the list of runs, on run directories in every state."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from common import run_status
from common.checkpoint_files import record_files
from common.errors import UserError
from common.rank_states import RankState
from common.run_status import Ending
from common.rundir import RunDir
from launch import app
from tests.watch.conftest import START, write_rows
from watch.monitor import checkpoints_table, monitor, runs_table
from watch.page import page, sparkline
from watch.records import list_runs, newest_run, read_records
from watch.snapshot import take_snapshot

ROOT = Path(__file__).resolve().parents[2]
LOGS = Path(__file__).parent / "logs"
Make = Callable[..., RunDir]


def _text(renderable: Any) -> str:
    output = io.StringIO()
    Console(file=output, width=200).print(renderable)
    return output.getvalue()


@pytest.fixture
def running(make_run: Make) -> RunDir:
    """Two ranks in step 41 of 200, one of them a step behind, one GPU too hot."""
    rates: dict[str, Any] = {"loss": 3.1, "lr": 3e-4, "step_seconds": 0.4, "tokens_per_second": 5200.0}
    run = make_run(step=41, checkpoint="step-20", checkpoint_time=START + 10, **rates)
    for rank, step in ((0, 41), (1, 38)):
        beat: dict[str, Any] = {"host": "node-a", "phase": "training", "step": step, "step_time": START + 58}
        RankState(rank=rank, time=START + 59, **beat).write(run.attempt(1))
    rows = [json.loads(line) for line in (LOGS / "slow.metrics.jsonl").read_text().splitlines()]
    write_rows(run.metrics, [*rows[:-1], {"step": 40, "val_loss": 3.05, "validation": {}}])
    shutil.copy(LOGS / "thermal_throttling.system.jsonl", run.system_samples())
    return run


def test_the_page_of_a_running_run(running: RunDir) -> None:
    text = _text(page(take_snapshot(running, START + 60)))
    for part in (
        "training  attempt 1, local, 2 ranks",
        "20%  step 41 of 200, 1 min 03 s to go",
        "lr 3.00e-04",
        "3.0500 in step 40",
        "5,200 tokens/s, 0.400 s per step, 100% of this run's median",
        "node-a:1",
        "61.2/79.7",
        "software thermal slowdown",
        "2 of 2, in steps 38 to 41",
        "rank 1 on node-a: training, step 38, last sign of life 1 s ago",
        "step-20, 50 s old",
        "! GPU 1 of node-a is slowed down",
    ):
        assert part in text, part
    assert "rank 0 on" not in text


def test_the_page_of_a_failed_run(make_run: Make) -> None:
    ending = Ending(exit_code=1, rank=1, cause="disk_full", summary="the disk is full", advice="make room")
    text = _text(page(take_snapshot(make_run(phase=run_status.FAILED, ending=ending), START + 999)))
    assert "failed" in text and "the disk is full" in text and "do this: make room" in text
    assert "to go" not in text


def test_validation_by_domain_with_its_error(make_run: Make) -> None:
    """Learned or forgotten beyond two standard errors only; rows of earlier versions have the smallest change only."""
    run = make_run(step=40)
    first = {"code": {"loss": 5.0}, "prose": {"loss": 3.0}, "old": {"loss": 4.0}}
    errors = {"tokens": 4096, "documents": 9, "standard_error": 0.2, "change_standard_error": 0.01, "change_since": 0}
    now = {
        "code": {"loss": 4.5, "change": -0.5, **errors},
        "prose": {"loss": 3.015, "change": 0.015, **errors},
        "old": {"loss": 4.015},
    }
    rows = [{"step": 0, "validation": first}, {"step": 40, "val_loss": 3.8, "validation": now}]
    write_rows(run.metrics, rows)
    text = _text(page(take_snapshot(run, START)))
    assert "validation  code 4.5000 in step 40, \u22120.500 ± 0.020 learned (4,096 tokens)" in text
    assert "prose 3.0150 in step 40, +0.015 ± 0.020 no clear change (4,096 tokens)" in text
    assert "old 4.0150 in step 40, +0.015 forgotten\n" in text
    found = take_snapshot(run, START).to_row()["validation"]
    assert {name: row["verdict"] for name, row in found.items()} == {
        "code": "learned", "prose": "no clear change", "old": "forgotten",
    }  # fmt: skip
    write_rows(run.metrics, rows[:1])
    assert take_snapshot(run, START).to_row()["validation"]["code"]["verdict"] == "not trained yet"


def test_a_silent_run_is_not_shown_as_training(make_run: Make) -> None:
    run = make_run()
    RankState(rank=0, host="node-a", phase="training", step=40, time=START + 60).write(run.attempt(1))
    snapshot = take_snapshot(run, START + 3660)
    assert snapshot.state == run_status.SILENT
    assert any("no rank has given a sign of life for 60 min" in sign.text for sign in snapshot.signs)


def test_a_run_without_new_checkpoints_is_warned_of(make_run: Make) -> None:
    run = make_run(recipe="qwen25_tiny", step=650, max_steps=800, checkpoint="step-200", checkpoint_time=START)
    (sign,) = take_snapshot(run, START + 60).signs
    assert (sign.name, sign.fatal) == ("no_checkpoint", False)
    assert "of step 200, in step 650" in sign.text


def test_json_for_other_programs(running: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(running.metrics, [{"step": 41, "loss": math.nan, "lr": 1e-3, "grad_norm": math.nan, "time": START + 1}])
    monitor(running, as_json=True, once=True)
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["step"], row["max_steps"], row["checkpoint"], row["grad_norm"]) == (41, 200, "step-20", None)
    assert [rank["step"] for rank in row["ranks"]] == [41, 38]
    assert row["nodes"][0]["gpus"][1]["temperature_c"] == 87
    assert any("not a finite number" in text for text in row["warnings"])


def test_json_goes_on_until_the_run_ends(
    make_run: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = make_run(), []

    def end_after_two(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            make_run(phase=run_status.DONE)

    monkeypatch.setattr("watch.monitor.time.sleep", end_after_two)
    monitor(run, interval_s=7.0, as_json=True)
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert len(states) == 3 and states[-1] == "done"
    assert looks == [7.0, 7.0]


def test_a_failed_run_is_watched_while_its_launcher_may_retry(
    make_run: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(phase=run_status.FAILED, ending=Ending(summary="killed from outside"))
    run.spec_file.write_text(json.dumps({**json.loads(run.spec_file.read_text()), "retries": 3}))
    held, looks = [True], []

    def go_on(seconds: float) -> None:
        """The second attempt starts, fails too, and is the last one."""
        looks.append(seconds)
        make_run(phase=run_status.TRAINING if len(looks) == 1 else run_status.FAILED, attempt=2)
        held[0] = len(looks) == 1

    monkeypatch.setattr("watch.snapshot.run_lock.is_held_elsewhere", lambda run, role: held[0])
    monkeypatch.setattr("watch.monitor.time.sleep", go_on)
    monitor(run, as_json=True)
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["retrying", "training", "failed"]


def test_an_interval_of_nothing_is_refused(make_run: Make) -> None:
    with pytest.raises(UserError):
        monitor(make_run(), interval_s=0.0)


def test_vccl_telemetry_is_shown_where_the_set_writes_it(make_run: Make, tmp_path: Path) -> None:
    run, folder = make_run(), tmp_path / "telemetry"
    folder.mkdir()
    (folder / "flow_0.log").write_text("first\nGB/s 41.2\n")
    run.env.write_text(json.dumps([{"key": "NCCL_TELEMETRY_LOG_PATH", "value": str(folder)}]))
    assert take_snapshot(run, START).to_row()["telemetry"] == ["flow_0.log: GB/s 41.2"]


def test_rows_of_an_abandoned_attempt_do_not_count(make_run: Make) -> None:
    run = make_run()
    write_rows(
        run.metrics,
        [
            {"step": 10, "loss": 3.0},
            {"step": 20, "loss": 9.9},
            {"step": 20, "val_loss": 9.9},
            {"step": 15, "loss": 2.9},
            {"step": 15, "val_loss": 2.8},
        ],
    )
    records = read_records(run)
    assert [(row["step"], row["loss"]) for row in records.training] == [(10, 3.0), (15, 2.9)]
    assert [row["step"] for row in records.validation] == [15]


def test_runs_from_before_the_status_file(make_run: Make) -> None:
    run = make_run()
    run.status.unlink()
    RankState(rank=0, state="done", time=START).write(run.attempt(1))
    write_rows(run.metrics, [{"step": 200, "loss": 2.5, "time": START}])
    records = read_records(run)
    assert (records.status.phase, records.status.step, records.status.loss) == ("done", 200, 2.5)


def test_list_newest_first(make_run: Make, tmp_path: Path) -> None:
    ending = Ending(exit_code=1, summary="GPU memory ran out")
    for age, (name, phase) in enumerate((("new", "training"), ("old", "failed"), ("oldest", "done"))):
        run = make_run(name, phase=phase, loss=2.5 + age, ending=ending if phase == "failed" else None)
        for path in (run.status, run.logs, run.path):
            os.utime(path, (START - age * 1000, START - age * 1000))
    (tmp_path / "runs" / "dry-run-only").mkdir()
    (tmp_path / "runs" / "a file").write_text("")
    assert [run.name for run in list_runs(tmp_path / "runs")] == ["new", "old", "oldest"]
    assert newest_run(tmp_path / "runs").name == "new"
    lines = _text(runs_table(tmp_path / "runs")).splitlines()
    assert [line.split()[0] for line in lines] == ["run", "new", "old", "oldest"]
    assert "failed: GPU memory ran out" in lines[2] and "40/200" in lines[2] and "3.5000" in lines[2]


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run yet"):
        newest_run(tmp_path / "runs")


def test_checkpoints_of_a_run(make_run: Make) -> None:
    run = make_run()
    for name in ("step-20", "step-40", "unfinished-step-60-after-attempt-1"):
        weights = run.checkpoints / name / "weights"
        weights.mkdir(parents=True)
        (weights / "metadata.json").write_text("{}")
    (run.checkpoints / "step-40-unfinished").write_text("")
    write_rows(run.metrics, [{"step": 20, "val_loss": 3.25, "validation": {}}])
    rows = {line.split()[0]: line.split()[1:] for line in _text(checkpoints_table(run)[0]).splitlines()}
    assert rows["step-20"][:2] == ["yes", "3.2500"]
    assert rows["step-40"][0] == rows["unfinished-step-60-after-attempt-1"][0] == "no"


def test_list_verify(make_run: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As saved, damaged, and of an earlier version without a list; the exit code says whether all are good."""
    run = make_run()
    for step in (10, 20, 40):
        weights = run.checkpoints / f"step-{step}" / "weights"
        weights.mkdir(parents=True)
        (weights / "metadata.json").write_text("{}")
        (weights / ".metadata").write_bytes(pickle.dumps(SimpleNamespace(storage_data={})))
        (weights / "__0_0.distcp").write_bytes(b"a" * 1000)
        if step > 10:
            record_files(weights.parent)

    def verify() -> tuple[int, dict[str, str]]:
        monkeypatch.setenv("COLUMNS", "200")
        done = CliRunner().invoke(app, ["list", "mine", "--runs", str(run.path.parent), "--verify"])
        return done.exit_code, {line.split()[0]: line for line in done.output.splitlines()}

    code, lines = verify()
    assert code == 0
    assert "as saved" in lines["step-20"] and "as saved" in lines["step-40"]
    assert "of full length (no checksums were recorded)" in lines["step-10"]
    (run.checkpoints / "step-40" / "weights" / "__0_0.distcp").write_bytes(b"b" + b"a" * 999)
    code, lines = verify()
    assert code == 1
    assert "as saved" in lines["step-20"]
    assert "DAMAGED: weights/__0_0.distcp has other content" in lines["step-40"]
    assert (run.checkpoints / "step-40").is_dir()  # it only looks


@pytest.mark.parametrize(
    ("values", "bars"), [([1, 2, 3], "▁▄█"), ([2, 2], "▁▁"), ([1, math.nan, 3], "▁x█"), ([], ""), ([math.inf], "x")]
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars
    assert len(sparkline([float(n) for n in range(1000)])) <= 40


def test_the_commands_need_no_torch_and_are_quick(running: RunDir) -> None:
    """What a person types on a machine that only shares the folder, one after the other in a process of their own."""
    commands = (
        ["monitor", "mine", "--once"],
        ["monitor"],
        ["list"],
        ["list", "mine"],
        ["diagnose", "mine", "--json"],
    )
    code = """
import json, sys, launch
for words in json.loads(sys.argv[1]):
    code = launch._run(words)
    print("heavy:", {"torch", "nemo", "nemo_run", "transformers"} & set(sys.modules), "code:", code, flush=True)
"""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=running.path.parents[1],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *shown, rest = done.stdout.split("heavy: set() code: 0\n")
    assert len(shown) == len(commands) and rest == ""
    assert all("mine" in text or "checkpoint" in text for text in shown)
    assert time.perf_counter() - start < 20
