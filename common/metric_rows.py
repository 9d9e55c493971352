"""The rows of metrics.jsonl, as a resumed run leaves them: what it repeats counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.json_files import read_json_lines

Row = dict[str, Any]


def read_metric_rows(path: Path, last_bytes: int | None = None) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Training and validation rows; going back to an earlier step is a resume, and drops what was done after it.

    Args:
        last_bytes: read only this much from the end of the file.
    """
    training: dict[int, Row] = {}
    validation: dict[int, Row] = {}
    for row in read_json_lines(path, last_bytes):
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
