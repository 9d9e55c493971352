"""Writing files that other processes may read, or that a crash must not leave half written; checksums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import time
from pathlib import Path

_BLOCK = 4 << 20  # bytes read at a time


def write_atomic(path: Path, content: str | bytes, *, sync: bool = True) -> None:
    """Replace the file in one step: a reader sees the old content or the new one, also after a crash.

    Args:
        sync: wait until the disk has the content. Without it a power failure can lose the file, which is right for one
            that is written again every few seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode("utf-8"))
        file.flush()
        if sync:
            os.fsync(file.fileno())
    part.replace(path)


def write_although_full(path: Path, text: str, *, sync: bool = True) -> None:
    """As `write_atomic`; if the disk is full, overwrite the file where it lies, which needs no new space.

    For the last state of a run that ends because the disk is full. The file must exist, and the text be no longer than
    the block that it has (4 KiB).
    """
    try:
        write_atomic(path, text, sync=sync)
    except OSError as problem:
        path.with_name(f".{path.name}.{os.getpid()}").unlink(missing_ok=True)
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        with path.open("r+", encoding="utf-8") as file:
            file.write(text)
            file.truncate()


def file_age_s(path: Path) -> float:
    """Seconds since a file was written, by the clock of its file system, which may be another machine's.

    By the clock of this machine where no file can be made beside it.

    Raises:
        OSError: there is no such file.
    """
    written, now = path.stat().st_mtime, time.time()
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=path.parent) as probe:
        now = os.fstat(probe.fileno()).st_mtime
    return max(0.0, now - written)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
