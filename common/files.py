"""Writing files that other processes may read, or that a crash must not leave half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace the file in one step: a reader sees the old text or the new one, also after a crash.

    Args:
        sync: wait until the disk has the text. Without it a power failure can lose the file, which is right for one
            that is written again every few seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    part.replace(path)
