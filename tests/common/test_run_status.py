"""status.json survives missing keys, keys of later versions, and readers that come while it is written."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from common import rank_states, run_status
from common.files import write_atomic
from common.json_files import append_json_line, read_json_lines, read_json_object
from common.metric_rows import read_metric_rows
from common.rank_states import RankState, read
from common.run_status import Ending, Heartbeat, RunStatus, read_status
from report.send.rows import read_new_points


def test_round_trip(tmp_path: Path) -> None:
    status = RunStatus(
        phase=run_status.FAILED,
        attempt=2,
        world_size=2,
        step=40,
        max_steps=200,
        loss=2.5,
        step_seconds=0.5,
        ranks=(Heartbeat(rank=0, host="a", step=40, time=5.0), Heartbeat(rank=1, host="b", step=39, time=4.0)),
        ending=Ending(exit_code=1, rank=1, signal="SIGKILL", cause="host_oom", can_retry=True),
    )
    status.write(tmp_path / "status.json")
    assert read_status(tmp_path / "status.json") == status
    assert list(tmp_path.iterdir()) == [tmp_path / "status.json"]


def test_other_versions() -> None:
    row = {"phase": "training", "step": 3, "planet": "mars", "ranks": [{"rank": 1, "mood": "good"}, {}, 7], "ending": 5}
    status = RunStatus.from_row(row)
    assert (status.phase, status.step, status.ranks, status.ending) == ("training", 3, (Heartbeat(rank=1),), None)


def test_a_loss_that_is_no_number_is_valid_json() -> None:
    text = RunStatus(loss=math.nan).to_json()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["loss"] is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "{'a': 1}"])
def test_broken_files_are_no_status(tmp_path: Path, text: str) -> None:
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path / "status.json") is None
    assert read_json_object(tmp_path / "absent") is None


@pytest.mark.parametrize(("age_s", "state"), [(5.0, run_status.TRAINING), (90.0, run_status.SILENT)])
@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 3600.0])
def test_clocks_that_differ(tmp_path: Path, ahead_s: float, age_s: float, state: str) -> None:
    """The clock of the machine that trains is an hour behind, right, or an hour ahead of this one's."""
    path, written = tmp_path / "status.json", time.time() - age_s
    RunStatus(phase=run_status.TRAINING, updated=written + ahead_s).write(path)
    os.utime(path, (written, written))
    status = read_status(path)
    assert status is not None and status.state(run_status.read_clock(path)) == state
    assert list(tmp_path.iterdir()) == [path]


def test_eta_and_silence() -> None:
    status = RunStatus(phase=run_status.TRAINING, step=40, max_steps=100, step_seconds=2.0, updated=1000.0)
    assert status.eta_seconds == 120.0
    assert dataclasses.replace(status, ends_by=1030.0).eta_seconds == 30.0  # trainer.max_time comes first
    assert dataclasses.replace(status, ends_by=2000.0).eta_seconds == 120.0
    assert status.state(1030.0) == run_status.TRAINING
    assert status.state(1000.0 + run_status.SILENT_AFTER_S + 1) == run_status.SILENT
    assert RunStatus(phase=run_status.DONE, updated=0.0).state(1e9) == run_status.DONE


def test_a_run_that_is_starting_may_wait_in_a_queue() -> None:
    gone: dict[str, Any] = {"host": socket.gethostname(), "pid": 2**22 + 1, "updated": 0.0}
    assert RunStatus(executor="slurm", **gone).state(1e9) == run_status.STARTING
    assert RunStatus(executor="local", **gone).state(1e9) == run_status.SILENT
    assert RunStatus(executor="local", pid=os.getpid(), updated=0.0).state(1e9) == run_status.STARTING
    assert RunStatus(executor="local", host="elsewhere", pid=2**22 + 1).state(1e9) == run_status.STARTING


def test_a_line_that_a_full_disk_cut_off_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 1})
    with path.open("a") as stream:
        stream.write('{"step": 2, "lo')
    append_json_line(path, {"step": 3})
    append_json_line(path, {"step": 4})
    assert [row["step"] for row in read_json_lines(path)] == [1, 3, 4]
    assert path.read_text().count("\n") == 4


def test_a_loss_that_is_not_finite_is_null_in_the_file_and_nan_for_readers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    domains = {"prose": {"loss": math.inf, "standard_error": None}}
    append_json_line(path, {"step": 1, "loss": math.nan, "grad_norm": None})
    append_json_line(path, {"step": 1, "val_loss": math.nan, "validation": domains})
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    ((training,), (validation,)) = read_metric_rows(path)
    assert math.isnan(training["loss"]) and training["grad_norm"] is None
    prose = validation["validation"]["prose"]
    assert math.isnan(validation["val_loss"]) and math.isnan(prose["loss"]) and prose["standard_error"] is None
    first, second = (point.numbers for point in read_new_points(path, 0)[0])
    assert math.isnan(first["train/loss"]) and math.isnan(second["val/prose/loss"])


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path, done = tmp_path / "x.json", threading.Event()
    write_atomic(path, json.dumps({"n": [0] * 10000}))

    def write() -> None:
        for number in range(50):
            write_atomic(path, json.dumps({"n": [number] * 10000}))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        assert read_json_object(path) is not None
    thread.join()
    assert list(tmp_path.iterdir()) == [path]


def test_last_lines_of_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(100)) + '{"step": 1')
    assert [row["step"] for row in read_json_lines(path)] == list(range(100))
    tail = [row["step"] for row in read_json_lines(path, last_bytes=60)]
    assert tail == list(range(100 - len(tail), 100)) and 2 < len(tail) < 8
    assert read_json_lines(tmp_path / "absent") == []


def test_rank_files_of_other_versions(tmp_path: Path) -> None:
    RankState(rank=1, step=7).write(tmp_path)
    (tmp_path / "rank-0.json").write_text('{"rank": 0, "state": "done", "new": 1}')
    (tmp_path / "rank-2.json").write_text('{"rank": 2, "st')
    assert [(state.rank, state.step) for state in read(tmp_path)] == [(0, 0), (1, 7)]


def test_a_rank_that_was_asked_to_stop_has_not_failed(tmp_path: Path) -> None:
    """With --retries it would be started again."""
    (tmp_path / "rank-0.json").write_text('{"rank": 0, "state": "running"}')
    assert rank_states.log_outcome(tmp_path, 2, exit_code=-10, asked=True) == 130
    (tmp_path / "rank-1.json").write_text('{"rank": 1, "state": "failed", "exit_code": 1, "error": "the disk is full"}')
    assert rank_states.log_outcome(tmp_path, 2, asked=True) == 1


@pytest.mark.parametrize(("exit_code", "free"), [(-7, 0), (None, 1 << 30)])
def test_a_rank_without_an_error_is_explained_by_what_is_known(
    exit_code: int | None, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk in memory ends a process with SIGBUS: "killed from outside (out of memory?)" sent people astray."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=free))
    assert rank_states.log_outcome(tmp_path, 1, exit_code=exit_code) == 1
    assert ("SIGBUS" in caplog.text and "is full" in caplog.text) == (exit_code == -7)
    assert ("killed from outside" in caplog.text) == (exit_code is None)
    monkeypatch.undo()
    assert rank_states.log_outcome(tmp_path / "never made", 1) == 1
