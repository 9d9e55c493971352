"""The files of a checkpoint with their sizes and checksums: recorded when it is saved, checked before it is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import file_sha256, write_atomic
from common.json_files import read_json_object
from common.stored_files import needed_bytes

LIST = Path("run") / "files.json"
SIDECAR = ".sha256"  # beside a file that is still to be listed: its checksum, taken while it was written


def record_files(checkpoint: Path) -> None:
    """List every file of the checkpoint with size and SHA-256, then remove the sidecar files of its writers.

    Raises:
        OSError: a file that weights/.metadata names is missing, or cannot be read.
    """
    sidecars = {path.with_suffix(""): path for path in checkpoint.rglob(f"*{SIDECAR}")}
    files = {}
    for path in sorted({*_files(checkpoint), *_needed_files(checkpoint / "weights")}):
        checksum = sidecars[path].read_text() if path in sidecars else file_sha256(path)
        files[str(path.relative_to(checkpoint))] = {"bytes": path.stat().st_size, "sha256": checksum}
    write_atomic(checkpoint / LIST, json.dumps(files, indent=1) + "\n")
    for path in sidecars.values():
        path.unlink()


def _needed_files(weights: Path) -> list[Path]:
    """Those that weights/.metadata names: the listing of a folder on a network file system may lack the newest."""
    return [weights / name for name in needed_bytes(weights)] if (weights / ".metadata").exists() else []


def find_damage(checkpoint: Path) -> list[str]:
    """Compare the checkpoint's files with their list; reads every file whose size is right.

    Without a list (`has_list`) only the lengths of the weight files are known, from weights/.metadata.

    Returns:
        a line per file that is missing or differs; none if all are as they were saved.
    """
    if not has_list(checkpoint):
        return _find_lost_list(checkpoint) + _find_short_files(checkpoint / "weights")
    listed = _read_list(checkpoint)
    if listed is None:
        return [f"{LIST} is not a list of files with their sizes and checksums"]
    problems = []
    for name, row in listed.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            problems.append(f"{name} is missing")
        elif size != row["bytes"]:
            problems.append(f"{name} has {size:,} bytes and was saved with {row['bytes']:,}")
    if problems:
        return problems
    with ThreadPoolExecutor(4) as pool:  # hashlib releases the interpreter's lock
        found = dict(zip(listed, pool.map(lambda name: file_sha256(checkpoint / name), listed), strict=True))
    return [
        f"{name} has other content than when it was saved (SHA-256 {found[name][:12]}, was {row['sha256'][:12]})"
        for name, row in listed.items()
        if found[name] != row["sha256"]
    ]


def _read_list(checkpoint: Path) -> dict[str, dict[str, Any]] | None:
    """File -> its size and checksum; None if the list is damaged."""
    listed = read_json_object(checkpoint / LIST)
    whole = bool(listed) and all(
        isinstance(row, dict) and isinstance(row.get("bytes"), int) and isinstance(row.get("sha256"), str)
        for row in (listed or {}).values()
    )
    return listed if whole else None


def _find_lost_list(checkpoint: Path) -> list[str]:
    """A list is written with every checkpoint: one that an earlier checkpoint of the run has is missing here."""
    name = re.fullmatch(r"step-(\d+)", checkpoint.name)
    steps = [re.fullmatch(r"step-(\d+)", path.parents[1].name) for path in checkpoint.parent.glob(f"step-*/{LIST}")]
    earlier = [int(found[1]) for found in steps if name and found and int(found[1]) < int(name[1])]
    return [f"{LIST} is missing, and step-{max(earlier)} has one"] if earlier else []


def _find_short_files(weights: Path) -> list[str]:
    try:
        needed = needed_bytes(weights)
    except ValueError as error:
        return [f"weights/.metadata cannot be read ({error})"]
    problems = []
    for name, end in needed.items():
        size = (weights / name).stat().st_size if (weights / name).is_file() else None
        if size is None:
            problems.append(f"weights/{name} is missing")
        elif size < end:
            problems.append(f"weights/{name} has {size:,} bytes, and {end:,} belong to it")
    return problems


def check_undamaged(checkpoint: Path) -> None:
    """Check that the checkpoint's files are as they were saved, as far as that is known (`find_damage`).

    Raises:
        UserError: a file is missing or differs.
    """
    if problems := find_damage(checkpoint):
        raise UserError(
            f"the checkpoint {checkpoint} is damaged",
            expected="files as they were when the checkpoint was saved",
            found="; ".join(problems),
            do=f"take another one: ls {checkpoint.parent}",
        )


def has_list(checkpoint: Path) -> bool:
    """Whether the checkpoint's files were listed; checkpoints of earlier versions and imported ones have no list."""
    return (checkpoint / LIST).exists()


def total_bytes(checkpoint: Path) -> int:
    """Size of all files of a checkpoint in bytes."""
    return sum(path.stat().st_size for path in _files(checkpoint))


def _files(checkpoint: Path) -> Iterator[Path]:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.suffix != SIDECAR and path != checkpoint / LIST:
            yield path


def copy_by_links(source: Path, target: Path) -> Path:
    """Copy a folder as hard links to its files; where the file system has none, as files.

    Returns:
        `target`, which replaces what an ended process may have left there.
    """
    shutil.rmtree(target, ignore_errors=True)

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, target, copy_function=link)
    return target
