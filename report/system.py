"""What the samples of the machines say: energy, and GPUs that were slowed down by heat."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from common.json_files import read_json_lines
from common.rundir import RunDir

_HEAT = {"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"}
_J_PER_KWH = 3.6e6


@dataclass(frozen=True)
class SystemFacts:
    """Of all nodes and attempts.

    Args:
        energy_kwh: of the GPUs while the run was sampled; None where they do not report it.
        hot_share: share of the GPU samples with a clock lowered by heat, 0 to 1; None without GPUs.
        power: (hours since the first sample, watts of all GPUs of the first node), one per sample.
    """

    energy_kwh: float | None = None
    hot_share: float | None = None
    power: list[tuple[float, float]] = field(default_factory=list)


def read_system(run: RunDir) -> SystemFacts:
    """Read system.jsonl, system-1.jsonl and so on."""
    files = sorted(path for path in run.path.glob("system*.jsonl") if re.fullmatch(r"system(-\d+)?\.jsonl", path.name))
    nodes = [read_json_lines(path) for path in files]
    gpus = [gpu for rows in nodes for row in rows for gpu in _gpus(row)]
    hot = [bool(_HEAT & set(gpu.get("throttled_by") or ())) for gpu in gpus if "throttled_by" in gpu]
    joules = [value for rows in nodes for value in _energies(rows)]
    first = nodes[0] if nodes else []
    power = [
        ((row["time"] - first[0]["time"]) / 3600, sum(gpu.get("power_w", 0.0) for gpu in _gpus(row)))
        for row in first
        if any("power_w" in gpu for gpu in _gpus(row))
    ]
    return SystemFacts(sum(joules) / _J_PER_KWH if joules else None, sum(hot) / len(hot) if hot else None, power)


def _gpus(row: dict[str, Any]) -> list[dict[str, Any]]:
    found = row.get("gpus")
    return [gpu for gpu in found if isinstance(gpu, dict)] if isinstance(found, list) else []


def _energies(rows: list[dict[str, Any]]) -> list[float]:
    """Joules of each GPU in each attempt: its counter at the end minus that at the start."""
    counters: dict[tuple[Any, Any], list[float]] = {}
    for row in rows:
        for gpu in _gpus(row):
            if isinstance(gpu.get("energy_j"), int | float):
                counters.setdefault((row.get("attempt"), gpu.get("index")), []).append(gpu["energy_j"])
    return [values[-1] - values[0] for values in counters.values() if values[-1] >= values[0]]
