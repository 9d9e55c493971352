"""The launcher ends a rank that is stopped for too long, and says so; one that writes its state it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from common import processes, rank_states
from common.rank_states import FAILED, RankState
from launcher.rank_watch import RankWatch
from watch.known_failures import find_known


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield child
    child.kill()
    child.wait()


def test_a_rank_that_is_stopped_is_ended_with_a_diagnosis(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    RankState(rank=0, pid=process.pid, pid_started=processes.start_time(process.pid), step=7).write(tmp_path)
    with RankWatch(tmp_path, limit_s=0.1, interval_s=0.02):
        assert process.wait(60) == -signal.SIGKILL
    (state,) = rank_states.read(tmp_path)
    assert (state.state, state.step, state.exit_code) == (FAILED, 7, 1)
    assert f"process {process.pid}" in state.error and "is stopped by a signal" in state.error
    match = find_known(state.error)
    assert match is not None and match.failure.name == "frozen_rank" and "SIGSTOP" in match.cause


def test_a_rank_that_writes_its_state_is_left_alone(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    started, enough = processes.start_time(process.pid), threading.Event()
    looks: list[float] = []
    watch = RankWatch(tmp_path, limit_s=0.1, interval_s=0.02)
    read = rank_states.read

    def write_and_read(logs: Path) -> list[RankState]:
        looks.append(1.0)
        enough.set() if len(looks) > 20 else None
        RankState(rank=0, pid=process.pid, pid_started=started).write(tmp_path)
        return read(logs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.rank_watch.rank_states.read", write_and_read)
        with watch:
            assert enough.wait(60)
    assert process.poll() is None


def test_a_start_that_does_not_come_is_ended(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = psutil.Process(process.pid)  # a test session has other child processes
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [own])
    with RankWatch(tmp_path, limit_s=0.05, interval_s=0.02):
        assert process.wait(60) == -signal.SIGKILL


def test_a_process_id_that_was_given_again_is_another_process() -> None:
    started = processes.start_time()
    assert started is not None
    assert processes.is_alive(os.getpid(), started) and processes.is_alive(os.getpid())
    assert not processes.is_alive(os.getpid(), started - 1)
    assert not RankState(rank=0, pid_started=started - 1).is_alive()
