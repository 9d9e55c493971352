"""What is sent of a run: the new lines of metrics.jsonl as named numbers, and its configuration as flat values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.json_files import parse_json, read_json_object
from common.metric_rows import restore_nan
from common.rundir import RunDir

_MOST_BYTES = 1 << 20  # read at once
MOST_NUMBERS = 1000  # in what is handed to a service at once: one request at MLflow, which it takes whole or not at all
_NOT_IN_A_NAME = re.compile(r"[^\w./ -]")  # MLflow takes letters, digits and these in the name of a metric


@dataclass(frozen=True)
class Point:
    """One line of metrics.jsonl.

    Args:
        step: optimizer steps completed.
        time: unix seconds.
        numbers: by name, `train/loss`, `val/DOMAIN/loss` or `evaluation/TASK/...`; the values are those of the file.
    """

    step: int
    time: float
    numbers: dict[str, float]


def read_new_points(path: Path, offset: int) -> tuple[list[Point], int]:
    """The complete lines of metrics.jsonl from a byte offset on, and the offset behind them.

    At most `MOST_NUMBERS` numbers, or one line that has more.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            block = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return [], offset
    points: list[Point] = []
    left = MOST_NUMBERS
    for line in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
        point = _to_point(line)
        left -= len(point.numbers) if point is not None else 0
        if left < 0 and points:
            break
        points += [point] if point is not None else []
        offset += len(line)
    return points, offset


def _to_point(line: bytes) -> Point | None:
    try:
        row = parse_json(line)
    except ValueError:  # half a line of an attempt that was killed
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    rest = {name: value for name, value in restore_nan(row).items() if name not in ("step", "time")}
    if "validation" in rest:
        found = dict(_numbers(rest.pop("validation"), "val"))
        found |= {f"val/{name.removeprefix('val_')}": value for name, value in _numbers(rest, "")}
    else:
        found = dict(_numbers(rest, "" if "evaluation" in rest else "train"))
    return Point(row["step"], float(row.get("time") or 0.0), found)


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number in nested objects by its path; a text, a list or null is no metric."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _numbers(child, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield _NOT_IN_A_NAME.sub("_", name), value


def read_configuration(run: RunDir) -> dict[str, Any]:
    """The run's numbers by the paths that overrides use (`optim.config.lr`), and how and from what it was started."""
    found: dict[str, Any] = {}
    if run.config.is_file():
        found = dict(_leaves(yaml.safe_load(run.config.read_text())))
    spec = read_json_object(run.spec_file) or {}
    found |= {f"run.{name}": spec[name] for name in ("recipe", "executor", "profile", "attempt") if spec.get(name)}
    for name, path in (("code", run.version), ("command", run.command)):
        if path.is_file():
            found[f"run.{name}"] = path.read_text().strip()
    for corpus, facts in (read_json_object(run.data) or {}).items():
        found[f"corpus.{Path(corpus).name}.tokens"] = facts["splits"]["train"]["tokens"]
        found[f"corpus.{Path(corpus).name}.train_sha256"] = facts["splits"]["train"]["bin_sha256"]
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """`path -> value`; the names of classes and functions, which NeMo-Run writes as _target_, are left out."""
    if isinstance(value, dict):
        for key, child in value.items():
            if not str(key).startswith("_"):
                yield from _leaves(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        yield path, json.dumps(value)
    elif value is not None:
        yield path, value
