"""Earlier runs beside a run: what they were, how fast they trained and with which power. Reads their files only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run_status
from common.json_files import read_json_lines, read_json_object
from common.run_status import read_status
from common.rundir import RunDir
from recipes.resolve import Resolved, resolve

PILOTS, PILOT_FILE = Path("pilots"), "pilot.json"  # written by `launch.py pilot` (planning/pilot.py)
MOST_RUNS = 50  # the newest that are looked at: a plan takes less than a second
_BYTES = 2**20  # read of each file, from its end
_WARM_UP = 3  # rows at the start of an attempt that hold the start-up
_BUSY_PERCENT = 50  # a GPU that computes; less is between two attempts, or the start


@dataclass(frozen=True)
class EarlierRun:
    """A run that has trained.

    Args:
        resolved: what it was asked for, with every number.
        finished: it came to its end.
        host: of its first node.
        gpu: name of its GPUs as the driver reports it, "" without one.
        tokens_per_second: median of its logged steps, of all ranks.
        memory_gib: the most that rank 0 reported.
        power_w: median power of one GPU while it computed; None where it is not reported.
    """

    folder: Path
    resolved: Resolved
    finished: bool
    host: str
    gpu: str
    tokens_per_second: float | None
    memory_gib: float | None
    power_w: float | None


def find_earlier_runs(root: Path) -> Iterator[EarlierRun]:
    """The runs in a folder of runs, newest first; one that cannot be read is left out."""
    folders = [path.parent for path in root.glob("*/metrics.jsonl")]
    folders.sort(key=lambda path: (path / "metrics.jsonl").stat().st_mtime, reverse=True)
    for folder in folders[:MOST_RUNS]:
        try:
            resolved = resolve(RunDir.at(folder).spec())
        except Exception:  # a recipe that was renamed, or a file of the user's that no longer runs
            continue
        yield _read(RunDir.at(folder), resolved)


def _read(run: RunDir, resolved: Resolved) -> EarlierRun:
    status = read_status(run.status)
    rows = [row for row in read_json_lines(run.metrics, _BYTES) if "loss" in row][_WARM_UP:]
    samples = read_json_lines(run.system_samples(), _BYTES)
    gpus = _gpus(samples)
    return EarlierRun(
        folder=run.path,
        resolved=resolved,
        finished=status is not None and status.phase == run_status.DONE,
        host=str(samples[-1].get("host", "")) if samples else "",
        gpu=str(gpus[-1].get("name", "")) if gpus else "",
        tokens_per_second=_median(row.get("tokens_per_second") for row in rows),
        memory_gib=max((row["memory_gib"] for row in rows if isinstance(row.get("memory_gib"), float)), default=None),
        power_w=_busy_power(gpus),
    )


def read_power(run: RunDir) -> float | None:
    """Median power (watts) of one GPU of the first node while it computed; None where it is not reported."""
    return _busy_power(_gpus(read_json_lines(run.system_samples(), _BYTES)))


def _gpus(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [gpu for row in samples for gpu in row.get("gpus", []) if isinstance(gpu, dict)]


def _busy_power(gpus: list[dict[str, Any]]) -> float | None:
    return _median(gpu.get("power_w") for gpu in gpus if gpu.get("utilization_percent", 0) >= _BUSY_PERCENT)


def _median(values: Any) -> float | None:
    found = [value for value in values if isinstance(value, int | float)]
    return statistics.median(found) if found else None


def highest_rate(run: RunDir | None, base: str, root: Path | None = None) -> tuple[float, str] | None:
    """The highest peak learning rate of a pilot or a finished run on that base, and its folder; None without any.

    Args:
        run: left out; its folder is the one that is looked at, and the pilots beside it.
        root: the folder of runs, without `run`.
    """
    folder = run.path.parent if run is not None else root
    if folder is None:
        return None
    own = run.path.resolve() if run is not None else None
    found = list(_pilot_rates(folder.parent / PILOTS, base))
    for other in sorted(folder.glob("*/base.json")):
        status = read_status(other.parent / "status.json")
        if other.parent.resolve() == own or status is None or status.phase != run_status.DONE:
            continue
        if (read_json_object(other) or {}).get("source") == base:
            try:
                found.append((resolve(RunDir.at(other.parent).spec()).plan.max_lr, str(other.parent)))
            except Exception:  # as above
                continue
    return max(found, default=None)


def _pilot_rates(pilots: Path, base: str) -> Iterator[tuple[float, str]]:
    """The highest learning rate of each pilot on that base that came to a finite loss, and its folder."""
    for file in sorted(pilots.glob(f"*/{PILOT_FILE}")):
        kept = read_json_object(file) or {}
        try:
            if kept["design"]["base"] == base:
                good = [one for one in kept["results"] if all(map(math.isfinite, one["changes"].values()))]
                yield max(float(one["rate"]) for one in good), str(file.parent)
        except (KeyError, TypeError, ValueError, AttributeError):  # not finished, or not a pilot of ours
            continue
