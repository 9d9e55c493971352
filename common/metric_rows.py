"""The rows of metrics.jsonl: how a number that is not finite is stored, and what a resumed run repeats.

A loss that is not finite is null in the file (common/json_files.py), and NaN in a row that is read here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.json_files import read_json_lines

Row = dict[str, Any]


_NEVER_MISSING = ("loss", "val_loss", "perplexity", "bits_per_byte", "change")  # null: it was not finite


def restore_nan(row: Row) -> Row:
    """A parsed line of metrics.jsonl with NaN where a loss was not finite."""
    found = {name: math.nan if value is None and name in _NEVER_MISSING else value for name, value in row.items()}
    if isinstance(domains := row.get("validation"), dict):
        found["validation"] = {n: restore_nan(one) if isinstance(one, dict) else one for n, one in domains.items()}
    return found


def read_metric_rows(path: Path, last_bytes: int | None = None) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Training and validation rows; going back to an earlier step is a resume, and drops what was done after it.

    Args:
        last_bytes: read only this much from the end of the file.
    """
    training: dict[int, Row] = {}
    validation: dict[int, Row] = {}
    for row in map(restore_nan, read_json_lines(path, last_bytes)):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if "val_loss" in row or "validation" in row:
            validation[step] = row
        elif "loss" in row:
            if training and step <= next(reversed(training)):
                training = {s: kept for s, kept in training.items() if s < step}
                validation = {s: kept for s, kept in validation.items() if s <= step}
            training[step] = row
    return tuple(training.values()), tuple(validation.values())
