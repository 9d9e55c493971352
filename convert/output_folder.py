"""The folder that a converted model is written to: checked before writing, complete or absent afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError

_SPARE_BYTES = 64 << 20  # context, tokenizer, safetensors headers


def check_output(output: Path, num_bytes: int) -> None:
    """Check before anything is written that the folder is free and the disk is large enough.

    Raises:
        UserError: `output` exists and is not an empty folder, or fewer than `num_bytes` and some spare are free.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(
            f"{output} is in use",
            expected="a folder that is empty or does not exist",
            found="a file" if not output.is_dir() else f"{len(list(output.iterdir()))} entries",
            do="give another output folder, or remove this one first",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(output.parent).free, num_bytes + _SPARE_BYTES
    if free < needed:
        raise UserError(
            f"not enough disk space for {output}",
            expected=f"{needed / 2**30:.2f} GiB free",
            found=f"{free / 2**30:.2f} GiB free",
            do="free some space, or give an output folder on another disk",
        )


@contextlib.contextmanager
def complete_or_absent(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output`: renamed to `output` when the block ends, removed if it fails."""
    building = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        _apply_umask(building)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
        building.rename(output)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _apply_umask(folder: Path) -> None:
    """Give every file the permissions of an ordinary new file: safetensors 0.8 creates its files as 0600."""
    probe = folder / ".new-file"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)
