"""Processes that end with their parent, and signals that ask to stop."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from invoke.context import Context

from common import processes
from common.files import write_although_full
from launcher.executors.tunnel import run_command


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    script = f"""
import os, time
from common import processes
parent = os.getpid()
pid = os.fork()
if pid == 0:
    processes.end_with_parent(parent)
    open({str(tmp_path / "child")!r}, "w").write(str(os.getpid()))
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.01)
    child = int((tmp_path / "child").read_text())
    assert processes.is_alive(child)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while processes.is_alive(child):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_watch_names_the_process_that_is_gone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gone: list[int] = []
    processes.watch([os.getpid(), other.pid], gone.append)
    time.sleep(0.2)
    assert not gone
    other.kill()  # a zombie until somebody waits for it
    end = time.monotonic() + 5
    while gone != [other.pid]:
        assert time.monotonic() < end
        time.sleep(0.01)
    other.communicate()


def test_starters_are_the_parent_and_a_launcher_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(processes.LAUNCHER_PROCESS, raising=False)
    assert processes.starters() == [os.getppid()]
    monkeypatch.setenv(processes.LAUNCHER_PROCESS, "another-host:123")
    assert processes.starters() == [os.getppid()]
    processes.name_launcher()
    assert processes.starters() == [os.getppid(), os.getpid()]


@pytest.mark.parametrize("nested", [False, True])
def test_a_ctrl_c_during_a_scheduler_command_is_not_lost(nested: bool) -> None:
    """invoke swallows KeyboardInterrupt while its command runs: without defer_stop_signals this test fails."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    tunnel: Any = types.SimpleNamespace(run=Context().run)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    outcome = None
    try:
        outer = processes.defer_stop_signals() if nested else contextlib.nullcontext()
        with pytest.raises(KeyboardInterrupt), outer:
            outcome = run_command(tunnel, ["sh", "-c", "sleep 0.5; echo accepted"]).stdout
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome == ("accepted\n" if nested else None)  # a job that Slurm has accepted is known


def test_under_nohup_a_hangup_stays_ignored() -> None:
    before = {number: signal.getsignal(number) for number in processes.STOP_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        processes.interrupt_on_stop_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("end", "code"), [("processes.leave(3)", 3), ("sys.exit(3)", -signal.SIGABRT)])
def test_no_library_changes_the_exit_code(end: str, code: int) -> None:
    """A C library that aborts in its destructor, as onnxruntime did."""
    script = f"""
import atexit, ctypes, sys
from common import processes
libc = ctypes.CDLL(None)
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
atexit.register(print, "python's own")
print("said", end=" ")
{end}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "said python's own\n")


def test_a_full_disk_takes_the_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str, *, sync: bool = True) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("common.files.write_atomic", full)
    file = tmp_path / "rank-0.json"
    with pytest.raises(OSError, match="No space"):
        write_although_full(file, "{}")
    file.write_text('{"state": "running, and longer than what follows"}')
    write_although_full(file, '{"state": "failed"}')
    assert file.read_text() == '{"state": "failed"}'
