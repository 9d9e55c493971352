"""One launcher and one rank 0 per run directory: locks that the kernel releases when their process ends.

A record lock (fcntl) belongs to a process: it is not inherited by child processes, it is seen by other machines on a
network file system, and it cannot be left behind. The file also says who holds it. Where a file system has no such
locks, a file stands for one (common/file_lock.py).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from common import file_lock
from common.errors import UserError
from common.json_files import read_json_object

LAUNCHER, RANK_0 = "launcher", "rank 0"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # this file system has none
log = logging.getLogger("launch")
# lock files of this process: closing any descriptor of one releases it; None is a lock without a descriptor
_held: dict[Path, int | None] = {}
_PREFIX = ".lock-"
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: kind, from where, start, length, process
_WATCH_S = 1.0


class RunInUseError(UserError):
    """Another process writes this run."""


def acquire(run: Path, role: str) -> None:
    """Take the lock of this role until `release` or the end of the process; nothing happens if this process has it.

    Args:
        run: the run directory, which is made if it does not exist.
        role: LAUNCHER or RANK_0.

    Raises:
        RunInUseError: another process has it.
    """
    path = _path(run, role)
    if path in _held:
        return
    holder = {"role": role, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    try:
        descriptor = _lock(path)
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise _in_use(run, role) from None
        if not file_lock.take(_file(path), holder):
            raise _in_use(run, role) from None
        log.info("lock: the file system of %s has no locks: %s stands for one", run, _file(path).name)
        atexit.register(release, run, role)
        _held[path] = None
        return
    os.ftruncate(descriptor, 0)
    os.write(descriptor, (json.dumps(holder) + "\n").encode())
    _held[path] = descriptor


def _lock(path: Path) -> int:
    """Open and lock the file. The descriptor is that of the file that `path` names: it may be removed meanwhile.

    Raises:
        OSError: another process has the lock, or the file system has no locks.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its folder was removed again
            continue
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def release(run: Path, role: str) -> None:
    """Give the lock back. Its file stays: another process may be about to take it."""
    path = _path(run, role)
    if path not in _held:
        return
    descriptor = _held.pop(path)
    if descriptor is None:
        file_lock.give_back(_file(path))
    else:
        os.close(descriptor)


def remove_if_unused(run: Path) -> None:
    """Remove a run directory that holds nothing but lock files.

    To be called by the process that has the launcher's lock: another one that gets it now finds that its file is gone.
    """
    if not run.is_dir() or not all(path.name.startswith(_PREFIX) for path in run.iterdir()):
        return
    with contextlib.suppress(OSError):  # another launch has begun
        for path in run.iterdir():
            path.unlink()
        run.rmdir()


def is_held_elsewhere(run: Path, role: str) -> bool:
    """Whether another process has the lock. Only asks: a process that takes it meanwhile is not refused."""
    path = _path(run, role)
    if path in _held or not path.exists():
        return False
    with contextlib.suppress(OSError), path.open("rb") as stream:
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        found, *_ = struct.unpack(_FLOCK, fcntl.fcntl(stream, fcntl.F_GETLK, wanted))
        if found != fcntl.F_UNLCK:
            return True
    return file_lock.is_held(_file(path))


def watch_launcher(run: Path, on_gone: Callable[[], object]) -> bool:
    """Start a thread that calls `on_gone` when no launcher has the run any more.

    For ranks in a container, which cannot look up the launcher's process, and share the run directory with it.

    Returns:
        False, and no thread, if no launcher is seen to have it now: the mount may pass on no locks.
    """
    if not is_held_elsewhere(run, LAUNCHER):
        return False

    def wait() -> None:
        while is_held_elsewhere(run, LAUNCHER):
            time.sleep(_WATCH_S)
        on_gone()

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()
    return True


def check_free(run: Path) -> None:
    """Check that nobody writes the run.

    Raises:
        RunInUseError: a launcher or a rank 0 does.
    """
    for role in (LAUNCHER, RANK_0):
        if is_held_elsewhere(run, role):
            raise _in_use(run, role)


def _in_use(run: Path, role: str) -> RunInUseError:
    path = _path(run, role)
    by_file = _file(path).exists()
    holder = read_json_object(_file(path) if by_file else path) or {}
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"])) if "since" in holder else "unknown"
    return RunInUseError(
        f"{run} is in use",
        expected="one launch at a time for a run directory",
        found=f"{role}: process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {since}",
        do="wait for it or stop it; --name ANOTHER starts another run"
        + (f"; if that process is gone: rm {_file(path)}" if by_file else ""),
    )


def _path(run: Path, role: str) -> Path:
    return run.absolute() / f"{_PREFIX}{role.replace(' ', '-')}"


def _file(path: Path) -> Path:
    """The lock of a file system without locks."""
    return path.with_name(f"{path.name}-held")
