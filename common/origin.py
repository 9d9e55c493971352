"""runs/NAME/origin.json: what a run was made of, if it did not begin by training: a fork, or a merge of checkpoints."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.files import write_atomic
from common.json_files import read_json_object

FILE_NAME = "origin.json"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the first checkpoint of a run comes from.

    Args:
        kind: "fork" of one checkpoint, or "merge" of several.
        run: path of the run that the checkpoints belong to.
        steps: steps of these checkpoints, ascending.
        weights: of a merge, the weight of each; they sum to 1.
        shape: of a merge, how the weights were computed (recipes/merge_weights.py).
        files: SHA-256 of the list of files of each checkpoint, which holds their checksums; "" where there is none.
        earlier: the origin of `run`, if it has one.
    """

    kind: Literal["fork", "merge"]
    run: str
    steps: tuple[int, ...]
    weights: tuple[float, ...] = ()
    shape: str = ""
    files: tuple[str, ...] = ()
    earlier: Origin | None = None

    def describe(self) -> str:
        """One line, such as: forked from runs/long at step 8,000."""
        if self.kind == "fork":
            text = f"forked from {self.run} at step {self.steps[0]:,}"
        else:
            rows = zip(self.steps, self.weights, strict=True)
            parts = ", ".join(f"{step:,} ({weight:.3f})" for step, weight in rows)
            text = f"merged from {self.run}, {self.shape} weights: steps {parts}"
        return text if self.earlier is None else f"{text}; {self.run} was {self.earlier.describe()}"

    def write(self, path: Path) -> None:
        """Write the file."""
        write_atomic(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def read_origin(path: Path) -> Origin | None:
    """The origin in a file; None of a run that began by training, and of a file that cannot be read."""
    return parse_origin(read_json_object(path))


def parse_origin(row: dict[str, Any] | None) -> Origin | None:
    """The origin in the parsed file; None if it holds something else."""
    try:
        if row is None:
            return None
        lists = {name: tuple(row[name]) for name in ("steps", "weights", "files")}
        found = Origin(
            kind=row["kind"],
            run=str(row["run"]),
            steps=tuple(int(step) for step in lists["steps"]),
            weights=tuple(float(weight) for weight in lists["weights"]),
            shape=str(row["shape"]),
            files=tuple(str(one) for one in lists["files"]),
            earlier=parse_origin(row["earlier"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
    whole = found.kind == "fork" or (found.kind == "merge" and len(found.weights) == len(found.steps))
    return found if found.steps and whole else None
