"""Hashes of some blocks of a .bin file, so that damage is noticed at the start of a run, before all of it is read.

`data prepare` records up to 1,024 blocks of 1 MiB per file, which is all of a file of up to 1 GiB. A run compares a few
of them, others at each start. The passport compares the hash of the whole file (report/corpus_hashes.py).
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import BinaryIO

BLOCK_BYTES = 1 << 20
MAX_BLOCKS = 1024
CHECKED = 8  # per file and start: 8 MiB


def hash_blocks(path: Path) -> list[str]:
    """The hash of each recorded block, in order, as 16 hexadecimal digits."""
    with path.open("rb") as file:
        return [_hash(file, start) for start in block_starts(path.stat().st_size)]


def find_changed_block(path: Path, recorded: list[str], count: int = CHECKED) -> int | None:
    """Compare `count` random blocks with their recorded hashes.

    Returns:
        the offset in bytes of a block that differs, or None. None too if nothing was recorded (manifests of earlier
        versions).

    Raises:
        OSError: the file cannot be read.
    """
    starts = block_starts(path.stat().st_size)
    if not recorded:
        return None
    if len(starts) != len(recorded):
        return 0
    with path.open("rb") as file:
        for number in sorted(random.sample(range(len(starts)), min(count, len(starts)))):
            if _hash(file, starts[number]) != recorded[number]:
                return starts[number]
    return None


def block_starts(size: int) -> list[int]:
    """Offsets of the recorded blocks of a file of this size, in bytes: all blocks, or evenly spaced ones."""
    if size <= BLOCK_BYTES * MAX_BLOCKS:
        return list(range(0, size, BLOCK_BYTES))
    return [number * (size - BLOCK_BYTES) // (MAX_BLOCKS - 1) for number in range(MAX_BLOCKS)]


def _hash(file: BinaryIO, start: int) -> str:
    file.seek(start)
    return hashlib.blake2b(file.read(BLOCK_BYTES), digest_size=8).hexdigest()
