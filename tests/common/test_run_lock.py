"""One launcher and one rank 0 for a run directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import file_lock, run_lock
from common.run_status import FAILED, RunStatus
from common.rundir import choose
from common.spec import RunSpec
from launcher.claim import claim_run_directory


@contextlib.contextmanager
def _holder(run: Path) -> Iterator[tuple[int, int]]:
    """Another process that launches the run: its id, and a pipe; what is written to it has the run given up."""
    (read, write), (ask, asked) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        run_lock.acquire(run, run_lock.LAUNCHER)
        os.write(write, b"1")
        os.read(ask, 1)
        run_lock.remove_if_unused(run)
        run_lock.release(run, run_lock.LAUNCHER)
        os._exit(0)
    assert os.read(read, 1) == b"1"
    try:
        yield pid, asked
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Another process that launches runs/a."""
    with _holder(tmp_path / "a") as (pid, _):
        yield pid


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without fcntl locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def _is_free(run: Path) -> bool:
    return not run_lock.is_held_elsewhere(run, run_lock.LAUNCHER)


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


def test_a_refused_launch_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes while the lock is held: the next process to get it could be writing already."""
    release, there = run_lock.release, []

    def look_and_release(run: Path, role: str) -> None:
        there.append(run.exists())
        release(run, role)

    monkeypatch.setattr(run_lock, "release", look_and_release)
    with claim_run_directory(RunSpec(recipe="a", runs=str(tmp_path))) as run:
        assert run.path == tmp_path / "a" and run.path.exists()
    assert there == [False] and not run.path.exists()
    with claim_run_directory(RunSpec(recipe="a", runs=str(tmp_path))):
        run.attempt(1).mkdir(parents=True)
    assert run.path.exists() and _is_free(run.path)


def test_a_lock_is_on_the_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that opened the file before another one removed it does not take the lock of a file that is gone."""
    run, lockf = tmp_path / "a", fcntl.lockf
    with _holder(run) as (pid, asked):

        def lock_late(*args: int) -> None:
            if run.exists() and not _is_over(pid):
                os.write(asked, b"1")
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert not run.exists()
            lockf(*args)

        monkeypatch.setattr(fcntl, "lockf", lock_late)
        run_lock.acquire(run, run_lock.LAUNCHER)
        monkeypatch.undo()
    child = os.fork()
    if child == 0:
        run_lock._held.clear()
        os._exit(int(_is_free(run)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    run_lock.release(run, run_lock.LAUNCHER)


def _is_over(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def test_a_dry_run_removes_nothing_of_another_launch(tmp_path: Path) -> None:
    spec = RunSpec(recipe="a", runs=str(tmp_path / "runs"), dryrun=True)
    with claim_run_directory(spec) as run:
        (run.path / "slurm").mkdir(parents=True)
    assert not (tmp_path / "runs").exists()
    with claim_run_directory(spec) as run:
        run.attempt(1).mkdir(parents=True)  # somebody starts it
        (tmp_path / "runs" / "b").mkdir()
    assert run.attempt(1).exists() and (tmp_path / "runs" / "b").exists()


@pytest.mark.usefixtures("no_locks")
def test_a_file_stands_for_a_lock_that_the_file_system_does_not_have(tmp_path: Path) -> None:
    run = tmp_path / "a"
    with _holder(run) as (pid, _):
        assert not _is_free(run)
        with pytest.raises(run_lock.RunInUseError, match=rf"(?s)process {pid} on .*if that process is gone: rm {run}/"):
            run_lock.acquire(run, run_lock.LAUNCHER)
    assert _is_free(run)  # it was killed
    run_lock.acquire(run, run_lock.LAUNCHER)
    run_lock.acquire(run, run_lock.LAUNCHER)  # this process has it
    run_lock.remove_if_unused(run)
    run_lock.release(run, run_lock.LAUNCHER)
    assert not run.exists()


def test_asking_for_a_lock_does_not_take_it(holder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that starts in this moment would be refused."""
    monkeypatch.setattr(fcntl, "lockf", lambda *_: pytest.fail("it was taken"))
    assert run_lock.is_held_elsewhere(tmp_path / "a", run_lock.LAUNCHER)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".lock-launcher").touch()
    assert not run_lock.is_held_elsewhere(tmp_path / "b", run_lock.LAUNCHER)


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize(
    ("change", "age_s", "held"),
    [
        ({}, 0.0, True),
        ({"process_started": 1}, 0.0, False),  # another process has the id now
        ({"host": "elsewhere"}, 0.0, True),
        ({"host": "elsewhere"}, file_lock.STALE_AFTER_S + 60, False),  # nobody has touched it
    ],
)
def test_a_file_that_nobody_holds_any_more(change: dict[str, Any], age_s: float, held: bool, tmp_path: Path) -> None:
    with _holder(tmp_path):
        (file,) = tmp_path.glob(".lock-*-held")
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        os.utime(file, (time.time() - age_s,) * 2)
        assert _is_free(tmp_path) is not held
        if not held:
            run_lock.acquire(tmp_path, run_lock.LAUNCHER)
            assert json.loads(file.read_text())["pid"] == os.getpid()
            run_lock.release(tmp_path, run_lock.LAUNCHER)
            assert not file.exists()


def test_a_launcher_that_is_gone_is_noticed_by_its_lock(tmp_path: Path) -> None:
    """In a container its process cannot be looked up."""
    gone = threading.Event()
    assert not run_lock.watch_launcher(tmp_path / "a", gone.set)  # none was there
    with _holder(tmp_path / "a"):
        assert run_lock.watch_launcher(tmp_path / "a", gone.set)
        assert not gone.is_set()
    assert gone.wait(10)
