"""A lock that is a file, for file systems without fcntl locks: who creates it has it, who removes it gives it back.

Unlike a lock of the kernel it stays behind when its process is killed. So it says whose it is: on the same machine the
process can be looked up, and from another one its holder touches it as long as it lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from common import processes
from common.json_files import read_json_object

TOUCHED_EVERY_S = 30.0
STALE_AFTER_S = 600.0  # of a holder on another machine: longer than a file system or an import blocks a process


def take(path: Path, holder: dict[str, Any]) -> bool:
    """Create the file with what `holder` says, unless another process has it; remove a stale one first."""
    if is_held(path):
        return False
    if path.exists() and not _remove_stale(path):
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    started = processes.start_time(os.getpid())
    with os.fdopen(descriptor, "w") as stream:
        stream.write(json.dumps({**holder, "process_started": started}) + "\n")
    threading.Thread(target=_touch, args=(path, path.stat().st_ino), name="file-lock", daemon=True).start()
    return True


def give_back(path: Path) -> None:
    """Remove the file, if this process has it."""
    if _is_ours(path):
        path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether a living process has it, as far as that can be known; of a file that says nothing it is assumed."""
    holder = read_json_object(path)
    if holder is None or "pid" not in holder:
        return path.exists()
    if holder.get("host") == socket.gethostname():
        return processes.is_alive(holder["pid"], holder.get("process_started", 0))
    try:
        return time.time() - path.stat().st_mtime < STALE_AFTER_S
    except OSError:
        return False


def _remove_stale(path: Path) -> bool:
    """Remove the file of a process that is gone; False if another process was faster and has made a new one."""
    aside = path.with_name(f"{path.name}-stale-{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:  # another process removed it
        return True
    if is_held(aside):
        aside.rename(path)
        return False
    aside.unlink()
    return True


def _is_ours(path: Path) -> bool:
    holder = read_json_object(path) or {}
    return (holder.get("host"), holder.get("pid")) == (socket.gethostname(), os.getpid())


def _touch(path: Path, inode: int) -> None:
    with contextlib.suppress(OSError):  # it was given back
        while True:
            time.sleep(TOUCHED_EVERY_S)  # first, because it has just been written
            if path.stat().st_ino != inode:
                return
            os.utime(path)
