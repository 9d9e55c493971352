"""Read a run directory, complete or not: a run may be training, crashed or missing files, which become notes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.json_files import parse_json
from common.metric_rows import restore_nan
from common.origin import Origin, parse_origin
from common.run_status import RunStatus, read_status
from common.rundir import RunDir
from common.small_files import parse_yaml
from report.system import SystemFacts, read_system

Row = dict[str, Any]

# file -> what it holds; the report names those that are missing
RECORDS = {
    "spec.json": "what the launcher was asked for",
    "gates.json": "the model and data as the training process saw them",
    "data.json": "the manifests of the corpora",
    "blend.json": "domains and replay share",
    "ledger.json": "what was read in which stage",
    "base.json": "the weights it started from",
    "origin.json": "the checkpoints that it was forked or merged from",
    "step0.json": "the comparison with Hugging Face's loss at step 0",
    "export.json": "the comparison of the exported model with its checkpoint",
}
# a run from scratch has none of these; the ledger comes with the first checkpoint, the origin with `fork` and `soup`
FOR_CONTINUED = ("blend.json", "base.json", "step0.json", "export.json", "ledger.json", "origin.json")


@dataclass
class RunFiles:
    """Everything a run directory holds, parsed.

    Args:
        run: the run directory.
        config: config.yaml as nested dicts, {} if it cannot be read.
        env: rows of env.json.
        command: command.txt.
        version: version.txt.
        train: training rows by ascending step; where a step was trained twice, the later row.
        validation: validation rows by ascending step, likewise.
        records: parsed JSON of `RECORDS`, by file name; a missing or broken file has no entry.
        status: status.json, None for a run of an earlier version.
        system: energy and heat of the GPUs, from the samples of the machines.
        notes: what is missing or unreadable, one phrase for each.
    """

    run: RunDir
    config: dict[str, Any] = field(default_factory=dict)
    env: list[Row] = field(default_factory=list)
    command: str = ""
    version: str = ""
    train: list[Row] = field(default_factory=list)
    validation: list[Row] = field(default_factory=list)
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    status: RunStatus | None = None
    system: SystemFacts = field(default_factory=SystemFacts)
    notes: list[str] = field(default_factory=list)

    @property
    def origin(self) -> Origin | None:
        """What the run was forked or merged from."""
        return parse_origin(self.records.get("origin.json"))

    @property
    def continued(self) -> bool:
        """The run started from a base model's weights."""
        return "base.json" in self.records

    def at(self, path: str, default: Any = None) -> Any:
        """The resolved configuration's value at a dotted path."""
        return at(self.config, path, default)


def at(tree: Any, path: str, default: Any = None) -> Any:
    """The value at `a.b.c` of nested dicts, or `default`."""
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return default
        tree = tree[key]
    return tree


def number(value: Any) -> float | None:
    """A JSON number (NaN and infinities included), or None for anything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def finite(value: Any) -> float | None:
    """A finite number, or None."""
    found = number(value)
    return found if found is not None and math.isfinite(found) else None


def read_run(run: RunDir) -> RunFiles:
    """Parse everything that `run` holds; a missing or broken file never raises."""
    files = RunFiles(run)
    files.command = _read_text(run.command, files.notes, "the command")
    files.version = _read_text(run.version, files.notes, "the code version")
    files.config = _read_yaml(run.config, files.notes)
    env = _read_json(run.env, files.notes, "who set which environment variable")
    files.env = [row for row in env if isinstance(row, dict)] if isinstance(env, list) else []
    files.status, files.system = read_status(run.status), read_system(run)
    _read_metrics(files)
    for name, about in RECORDS.items():
        path = run.path / name
        if name in FOR_CONTINUED and not path.exists():
            continue  # the passport reports it where it matters
        value = _read_json(path, files.notes, about)
        if isinstance(value, dict):
            files.records[name] = value
        elif value is not None:
            files.notes.append(f"{name} holds a {type(value).__name__} instead of an object and is ignored")
    return files


def _read_text(path: Path, notes: list[str], about: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        notes.append(f"{path.name} does not exist: {about} cannot be shown")
        return ""


def _read_json(path: Path, notes: list[str], about: str) -> Any:
    if not (text := _read_text(path, notes, about)):
        return None
    try:
        return parse_json(text)
    except ValueError:
        notes.append(f"{path.name} is not valid JSON: {about} cannot be shown")
        return None


def _read_yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    import yaml

    text = _read_text(path, notes, "the resolved configuration")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        notes.append(f"{path.name} is not valid YAML: the resolved configuration cannot be shown")
        return {}
    return value if isinstance(value, dict) else {}


def _read_metrics(files: RunFiles) -> None:
    """Sort metrics.jsonl into training and validation rows; a resumed run replaces the steps that it repeats."""
    lines = _read_text(files.run.metrics, files.notes, "the course of the training").split("\n")
    train: dict[int, Row] = {}
    validation: dict[int, Row] = {}
    for position, line in enumerate(lines, start=1):
        row = _parse_row(line)
        if row is None:
            if line.strip():
                problem = "is cut off" if position == len(lines) else "is not a JSON row"
                files.notes.append(f"metrics.jsonl: line {position} {problem} and is ignored")
        elif "val_loss" in row or "validation" in row:
            validation[row["step"]] = {**validation.get(row["step"], {}), **row}
        elif "loss" in row:
            _add_training_row(row, train, validation)
    files.train = [train[step] for step in sorted(train)]
    files.validation = [validation[step] for step in sorted(validation)]


def _add_training_row(row: Row, train: dict[int, Row], validation: dict[int, Row]) -> None:
    """Add a row; an earlier step than before means a resume, so the later rows of the abandoned attempt are removed."""
    step = row["step"]
    if train and step <= next(reversed(train)):
        for later in [s for s in train if s >= step]:
            del train[later]
        for later in [s for s in validation if s > step]:
            del validation[later]
    train[step] = row


def _parse_row(line: str) -> Row | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return restore_nan(row)
