"""Where a converted model is written: free, large enough, and whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError

_SPARE_BYTES = 64 << 20  # context, tokenizer, safetensors headers


def check_room(output: Path, num_bytes: int) -> None:
    """Before the first byte is written: the place is free and the disk large enough."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"{output} is in use",
            expected="a folder that is empty or does not exist",
            found="a file" if not output.is_dir() else f"{len(list(output.iterdir()))} entries",
            do="name another output, or remove it first",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    free, need = shutil.disk_usage(output.parent).free, num_bytes + _SPARE_BYTES
    if free < need:
        raise UserError(
            f"not enough disk for {output}",
            expected=f"{need / 2**30:.2f} GiB free",
            found=f"{free / 2**30:.2f} GiB free",
            do="free space, or name an output on another disk",
        )


@contextlib.contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block ends, or is removed when it fails."""
    building = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        building.rename(output)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
