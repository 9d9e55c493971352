"""What the pinned stack and newer libraries disagree on. Each entry names the versions; tests/train/test_compat.py."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy


def apply() -> None:
    """Make all corrections; twice does no harm."""
    numpy_product()
    keep_mcore_data()


def numpy_product() -> None:
    """megatron-core 0.12 and 0.13 call `numpy.product`, gone since numpy 2: saving the distributed optimizer dies."""
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod


def keep_mcore_data() -> None:
    """torch 2.11 writes a checkpoint's metadata from a copy without megatron-core's own attribute `mcore_data`.

    Without it a run with the distributed optimizer saves in silence and cannot be resumed ('Metadata' object has
    no attribute 'mcore_data'; seen with torch 2.11 and megatron-core 0.13.1, not with torch 2.13).
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if not hasattr(FileSystemWriterAsync.finish, "__wrapped__"):
        FileSystemWriterAsync.finish = _with_all_attributes(FileSystemWriterAsync.finish)


def _with_all_attributes(finish: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(finish)
    def whole(self: Any, metadata: Any, results: Any) -> None:
        finish(self, metadata, results)
        path = Path(self.path) / ".metadata"
        if not path.is_file():  # object storage
            return
        written = pickle.loads(path.read_bytes())
        lost = {name: value for name, value in vars(metadata).items() if name not in vars(written)}
        if lost:
            vars(written).update(lost)
            part = path.with_name(".metadata.whole")
            part.write_bytes(pickle.dumps(written))
            part.replace(path)

    return whole
