"""The result of an evaluation: as a table, as JSON, and read again for the report and the model card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.files import write_atomic
from common.json_files import read_json_object
from common.rundir import RUNS, RunDir
from report.evaluation.comparison import RULE, Row

if TYPE_CHECKING:
    from rich.table import Table

RESULT = "evaluation.json"  # in an exported folder; a run has one per evaluated step
STYLES = {"better": "green", "worse": "bold red", "same": "dim"}


@dataclass(frozen=True)
class Evaluation:
    """The result: what was scored, how, and one row per metric.

    Args:
        model: its name, as given; for a run its checkpoint.
        base: likewise, None if the model was only scored.
        step: of the checkpoint; None for a model that is not a run's.
        how: device, dtype, versions, and the sha256 of both models' files.
    """

    model: str
    base: str | None
    step: int | None
    how: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        content = {**asdict(self), "rule": RULE}
        write_atomic(path, json.dumps(content, indent=1) + "\n")

    def table(self) -> Table:
        """A table for the terminal."""
        from rich.table import Table
        from rich.text import Text

        title = self.model + (f" against {self.base}" if self.base else "")
        table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
        compared = self.base is not None
        for column in ("task", "metric", "items", *(("base",) if compared else ()), "model"):
            table.add_column(column, justify="left" if column in ("task", "metric") else "right", no_wrap=True)
        for column in ("difference ± error", "") if compared else ("± error",):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            cells = [row.task, row.metric, f"{row.items:,}"]
            cells += [f"{row.base:.3f}"] if row.base is not None else []
            error = row.paired_error if compared else row.standard_error
            shown = "" if error is None else f"± {error:.3f}"
            cells += [f"{row.value:.3f}", f"{row.difference:+.3f} {shown}" if row.difference is not None else shown]
            table.add_row(*map(Text, cells), *([Text(row.verdict, STYLES[row.verdict])] if compared else []))
        return table


def read_evaluation(path: Path) -> Evaluation | None:
    """A saved result; None if the file is absent, cut off, or of another form."""
    content = read_json_object(path)
    try:
        assert content is not None
        rows = [Row(**row) for row in content["rows"]]
        return Evaluation(content["model"], content["base"], content["step"], content["how"], rows)
    except (AssertionError, KeyError, TypeError):
        return None


def newest_evaluation(run: RunDir) -> Evaluation | None:
    """The result of the run's highest evaluated step."""
    found = [one for path in run.evaluations() if (one := read_evaluation(path)) is not None]
    return found[-1] if found else None


def find_exporting_run(folder: Path, root: Path = RUNS) -> RunDir | None:
    """The run whose newest export is this folder."""
    for record in sorted(root.glob("*/export.json")):
        row = read_json_object(record) or {}
        if isinstance(row.get("output"), str) and Path(row["output"]).resolve() == folder.resolve():
            return RunDir.at(record.parent)
    return None
