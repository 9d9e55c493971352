"""One launcher and one rank 0 for a run directory."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import run_lock
from common.run_status import FAILED, RunStatus
from common.rundir import choose, remove_if_unused
from common.spec import RunSpec


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Another process that launches runs/a."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_lock.acquire(tmp_path / "a", run_lock.LAUNCHER)
        os.write(write, b"1")
        time.sleep(60)
        os._exit(0)
    assert os.read(read, 1) == b"1"
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_the_second_launch_is_refused_and_says_by_whom(tmp_path: Path, holder: int) -> None:
    expected = rf"a is in use(?s:.*)launcher: process {holder} on {re.escape(os.uname().nodename)}, since \d{{4}}-"
    with pytest.raises(run_lock.RunInUseError, match=expected):
        run_lock.acquire(tmp_path / "a", run_lock.LAUNCHER)
    with pytest.raises(run_lock.RunInUseError):
        choose(RunSpec(recipe="a", name="a"), tmp_path)
    assert choose(RunSpec(recipe="a"), tmp_path).name == "a-2"  # without --name it takes the next number
    run_lock.acquire(tmp_path / "a", run_lock.RANK_0)  # another role
    run_lock.release(tmp_path / "a", run_lock.RANK_0)


def test_a_lock_ends_with_its_process(tmp_path: Path, holder: int) -> None:
    assert run_lock.is_held_elsewhere(tmp_path / "a", run_lock.LAUNCHER)
    os.kill(holder, signal.SIGKILL)
    end = time.monotonic() + 10
    while run_lock.is_held_elsewhere(tmp_path / "a", run_lock.LAUNCHER):
        assert time.monotonic() < end
    run_lock.acquire(tmp_path / "a", run_lock.LAUNCHER)
    run_lock.acquire(tmp_path / "a", run_lock.LAUNCHER)  # this process has it
    pid = os.fork()
    if pid == 0:  # a child does not inherit it
        run_lock._held.clear()
        os._exit(int(run_lock.is_held_elsewhere(tmp_path / "a", run_lock.LAUNCHER)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    run_lock.release(tmp_path / "a", run_lock.LAUNCHER)
    run_lock.check_free(tmp_path / "a")


def test_a_failed_submission_does_not_take_the_name(tmp_path: Path) -> None:
    run = choose(RunSpec(recipe="a"), tmp_path)
    run.path.mkdir()
    RunStatus(executor="docker", phase=FAILED).write(run.status)
    assert choose(RunSpec(recipe="a", name="a"), tmp_path).name == "a"


def test_a_refused_launch_leaves_no_folder(tmp_path: Path) -> None:
    run_lock.acquire(tmp_path / "a", run_lock.LAUNCHER)
    run_lock.release(tmp_path / "a", run_lock.LAUNCHER)
    run = choose(RunSpec(recipe="a"), tmp_path)
    assert run.name == "a"
    remove_if_unused(run)
    assert not run.path.exists()
    (run.path / "logs").mkdir(parents=True)
    remove_if_unused(run)
    assert run.path.exists()
