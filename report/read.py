"""Reading a run directory that may be running, crashed or half-written: what is there, and a note for what is not."""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.rundir import RUNS, RunDir

Row = dict[str, Any]

# file -> what it would have said; absent ones are named in the report
RECORDS = {
    "gates.json": "the model and data that really trained",
    "data.json": "the manifests of the corpora",
    "blend.json": "domains and replay share",
    "base.json": "the weights it started from",
    "step0.json": "the loss beside Hugging Face at step 0",
    "export.json": "parity of the exported weights",
}
FOR_CONTINUED = ("blend.json", "base.json", "step0.json", "export.json")  # a run from scratch has none of these


@dataclass
class RunFiles:
    """Everything a run directory holds, parsed.

    Args:
        run: the run directory.
        config: config.yaml as nested dicts, {} if it cannot be read.
        env: rows of env.json.
        command: command.txt.
        version: version.txt.
        train: training rows by ascending step; of a repeated step the later row.
        validation: validation rows by ascending step, the same way.
        records: parsed JSON of `RECORDS`, by file name; a file that is absent or broken has no entry.
        notes: what is missing or unreadable, one sentence each.
    """

    run: RunDir
    config: dict[str, Any] = field(default_factory=dict)
    env: list[Row] = field(default_factory=list)
    command: str = ""
    version: str = ""
    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def continued(self) -> bool:
        """The run started from a base model's weights."""
        return "base.json" in self.records

    def at(self, path: str, default: Any = None) -> Any:
        """The resolved configuration's value at a dotted path."""
        return at(self.config, path, default)


def at(tree: Any, path: str, default: Any = None) -> Any:
    """The value at `a.b.c` of nested dicts, or `default`."""
    for step in path.split("."):
        if not isinstance(tree, dict) or step not in tree:
            return default
        tree = tree[step]
    return tree


def number(value: Any) -> float | None:
    """A JSON number (NaN and infinities included), or None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def open_run(run: RunDir | str, root: Path = RUNS) -> RunDir:
    """The run directory called `run` (a name, or its path).

    Raises:
        UserError: there is none; the nearest names are offered.
    """
    if isinstance(run, str):
        path = Path(run)
        run = RunDir(path.name, path.parent if len(path.parts) > 1 else root)
    if run.name and run.path.is_dir():
        return run
    root = run.path.parent
    names = sorted(p.name for p in root.glob("*") if p.is_dir())
    near = difflib.get_close_matches(run.name, names, n=3, cutoff=0.4)
    raise UserError(
        f"no run {run.name!r}",
        expected=f"a folder under {root}" + (f": {', '.join(names[:8])}" if names else ""),
        found=f"{run.path} does not exist" if names else f"no runs at all under {root}",
        do=f"did you mean {' or '.join(near)}?" if near else "train first: python launch.py --recipe qwen25_tiny",
    )


def read(run: RunDir) -> RunFiles:
    """Parse whatever `run` holds; nothing in it makes this fail."""
    files = RunFiles(run)
    files.command = _text(run.command, files.notes, "the command")
    files.version = _text(run.version, files.notes, "the code version")
    files.config = _yaml(run.config, files.notes)
    env = _json(run.env, files.notes, "who set which environment variable")
    files.env = [row for row in env if isinstance(row, dict)] if isinstance(env, list) else []
    _metrics(files)
    for name, about in RECORDS.items():
        path = run.path / name
        if name in FOR_CONTINUED and not path.exists():
            continue  # the passport and the sections say so where it matters
        value = _json(path, files.notes, about)
        if isinstance(value, dict):
            files.records[name] = value
        elif value is not None:
            files.notes.append(f"{name} holds a {type(value).__name__}, not an object: ignored")
    return files


def _text(path: Path, notes: list[str], about: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        notes.append(f"{path.name} is not there: {about} is unknown")
        return ""


def _json(path: Path, notes: list[str], about: str) -> Any:
    if not (text := _text(path, notes, about)):
        return None
    try:
        return json.loads(text)
    except ValueError:
        notes.append(f"{path.name} is not whole JSON: {about} is unknown")
        return None


def _yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    import yaml

    text = _text(path, notes, "the resolved configuration")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        notes.append(f"{path.name} is not whole YAML: the resolved configuration is unknown")
        return {}
    return value if isinstance(value, dict) else {}


def _metrics(files: RunFiles) -> None:
    """Sort metrics.jsonl into training and validation rows; a resumed run replaces what it repeats."""
    lines = _text(files.run.metrics, files.notes, "how the training went").split("\n")
    train: dict[int, Row] = {}
    validation: dict[int, Row] = {}
    for position, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            if line.strip():
                cut = "is cut off (being written, or killed there)" if position == len(lines) else "is no JSON row"
                files.notes.append(f"metrics.jsonl: line {position} {cut}: ignored")
        elif "val_loss" in row or "validation" in row:
            validation[row["step"]] = {**validation.get(row["step"], {}), **row}
        elif "loss" in row:
            _append(row, train, validation)
    files.train = [train[step] for step in sorted(train)]
    files.validation = [validation[step] for step in sorted(validation)]


def _append(row: Row, train: dict[int, Row], validation: dict[int, Row]) -> None:
    """Going back to an earlier step means a resume: what the abandoned attempt did after it no longer counts."""
    step = row["step"]
    if train and step <= next(reversed(train)):
        for later in [s for s in train if s >= step]:
            del train[later]
        for later in [s for s in validation if s > step]:
            del validation[later]
    train[step] = row


def _row(line: str) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return row
