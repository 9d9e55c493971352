"""One launcher and one rank 0 per run directory: locks that the kernel releases when their process ends.

A record lock (fcntl) belongs to a process: it is not inherited by child processes, it is seen by other machines on a
network file system, and it cannot be left behind. The file also says who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from common.errors import UserError
from common.json_files import read_json_object

LAUNCHER, RANK_0 = "launcher", "rank 0"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # this file system has none
log = logging.getLogger("launch")
_held: dict[Path, int] = {}  # lock files of this process, by descriptor: closing any descriptor of one releases it


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
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        os.close(descriptor)
        if problem.errno in _NO_LOCKS:
            log.warning("lock: the file system of %s has no locks: start each run once only", run)
            return
        raise _in_use(run, role) from None
    holder = {"role": role, "host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, (json.dumps(holder) + "\n").encode())
    _held[path] = descriptor


def release(run: Path, role: str) -> None:
    """Give the lock back. Its file stays: another process may be about to take it."""
    if (descriptor := _held.pop(_path(run, role), None)) is not None:
        os.close(descriptor)


def is_held_elsewhere(run: Path, role: str) -> bool:
    """Whether another process has the lock."""
    path = _path(run, role)
    if path in _held or not path.exists():
        return False
    with contextlib.suppress(OSError), path.open("r+") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            return problem.errno not in _NO_LOCKS
    return False


def check_free(run: Path) -> None:
    """Check that nobody writes the run.

    Raises:
        RunInUseError: a launcher or a rank 0 does.
    """
    for role in (LAUNCHER, RANK_0):
        if is_held_elsewhere(run, role):
            raise _in_use(run, role)


def _in_use(run: Path, role: str) -> RunInUseError:
    holder = read_json_object(_path(run, role)) or {}
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"])) if "since" in holder else "unknown"
    return RunInUseError(
        f"{run} is in use",
        expected="one launch at a time for a run directory",
        found=f"{role}: process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {since}",
        do="wait for it or stop it; --name ANOTHER starts another run",
    )


def _path(run: Path, role: str) -> Path:
    return run.absolute() / f".lock-{role.replace(' ', '-')}"
