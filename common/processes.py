"""Signals that ask to stop, and other processes: are they alive, and what happens to one whose parent is gone."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER_PROCESS = "LAUNCHER_PROCESS"  # environment variable of a rank: HOST:PID of the launcher that waits for it
LAUNCHER_OUTSIDE = "LAUNCHER_OUTSIDE"  # of a rank in a container, whose launcher is seen by its lock only
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # SIGUSR1: Ctrl-C from the launcher


def ignore_stop_signals(*_: object) -> None:
    """Ignore the signals that ask to stop. To be called first in a child process (a `worker_init_fn` too)."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def not_ignored(signals: Sequence[signal.Signals] = STOP_SIGNALS) -> list[signal.Signals]:
    """Those that this process does not ignore: under nohup SIGHUP is ignored, and stays so."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def interrupt_on_stop_signals() -> None:
    """Have each signal that asks to stop raise KeyboardInterrupt; one that is ignored stays so (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may
    for number in not_ignored():
        signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def defer_stop_signals() -> Iterator[None]:
    """Let the block end before a signal that asks to stop takes effect; an ignored one stays so. Blocks may nest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in not_ignored()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def name_launcher() -> None:
    """Name this process in the environment as the launcher that waits for the ranks which it starts."""
    os.environ[LAUNCHER_PROCESS] = f"{socket.gethostname()}:{os.getpid()}"


def starters() -> list[int]:
    """The processes without which nobody watches this rank: torchrun, mpirun or srun's, and the launcher if it is here.

    The first process of a container has no parent to watch.
    """
    host, _, pid = os.environ.get(LAUNCHER_PROCESS, "").rpartition(":")
    launcher = [int(pid)] if host == socket.gethostname() else []
    return [*([os.getppid()] if os.getppid() > 1 else []), *launcher]


def watch(pids: Sequence[int], on_gone: Callable[[int], None]) -> None:
    """Start a thread that calls `on_gone` with the process id of the first of these processes that ends."""

    started = {pid: start_time(pid) for pid in pids}

    def wait() -> None:
        while True:
            for pid in pids:
                if not is_alive(pid, started[pid]):
                    return on_gone(pid)
            time.sleep(1.0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends.

    To be called first in a child process.

    Args:
        parent: process id of the parent, which may be gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def leave(code: int) -> NoReturn:
    """End this process with an exit code that nothing can change any more.

    Python's own exit functions run; the destructors of C libraries do not. One of them (onnxruntime, which a library
    imports where it is installed) has aborted a training process whose work was done and saved.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    os._exit(code)


def is_alive(pid: int, started: int | None = None) -> bool:
    """Whether a process with this id exists on this machine and has not ended.

    Args:
        started: its `start_time`; a process that has got the same id later is another one. None if unknown.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    state = _stat(pid)  # a process that has ended stays as a zombie until its parent asks for its exit code
    return bool(state) and state[0] != "Z" and started in (None, int(state[_START_TIME]))


def start_time(pid: int | None = None) -> int | None:
    """When a process of this machine started, in clock ticks since the boot; None if it has ended. Default: this one.

    With it a process id is unique until the next boot.
    """
    state = _stat(os.getpid() if pid is None else pid)
    return int(state[_START_TIME]) if state and state[0] != "Z" else None


def describe_state(pid: int) -> str:
    """What the kernel says a process does: it is stopped, computes, waits."""
    state = _stat(pid)
    return _STATES.get(state[0], f"is in state {state[0]}") if state else "has ended"


_START_TIME = 19  # of the fields that follow the name of the program in /proc/PID/stat (proc(5))
_STATES = {
    "R": "computes",
    "S": "waits",
    "D": "waits for a disk, a network file system or a device",
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name of the program; none of a process that does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def describe_exit(code: int) -> str:
    """An exit code as multiprocessing and subprocess give it: a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name} (the kernel's out-of-memory killer sends it)" if -code == signal.SIGKILL else name
