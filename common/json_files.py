"""JSON files that another process may be writing or reading, or that a crash or a full disk may have cut off."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, which also says of a text that is nested too deeply that it is no JSON.

    Raises:
        ValueError: no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if the file is absent, unreadable, cut off, or holds something else."""
    try:
        value = parse_json(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a file with one object per line; lines that are cut off or hold something else are left out.

    Args:
        last_bytes: read only this much from the end of the file, without the line that is cut there.
    """
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            start = max(0, size - last_bytes) if last_bytes is not None else 0
            stream.seek(start)
            lines = stream.read().split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines[1:] if start else lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def append_json_line(path: Path, row: dict[str, Any]) -> None:
    """Add one object as a line of its own, also where a full disk has cut off the line before it."""
    line = to_json_line(row)
    with path.open("ab+") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        cut_off = stream.read(1) not in (b"", b"\n")
        stream.write(("\n" + line if cut_off else line).encode())


def to_json_line(row: dict[str, Any]) -> str:
    """One line of a file with one object per line.

    A number that is not finite is written as null: JSON has no NaN, and other programs refuse the file.
    """
    return json.dumps(_without_nan(row), allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON list in a file; none if the file is absent, unreadable, or holds something else."""
    try:
        value = parse_json(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return []
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
