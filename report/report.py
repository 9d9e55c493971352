"""Write the report of a run: one self-contained HTML page and PNGs, from the files of its run directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import write_atomic
from common.rundir import RUNS, find_run
from report.analysis import DomainChange, compute_changes, compute_throughput, compute_tokens, describe_other_base
from report.attempts import read_attempts
from report.corpus_hashes import count_data_bytes
from report.evaluation.result import newest_evaluation
from report.figures import FIGURES, LabelledChanges, draw_figures
from report.page import ReportData, label_runs, render
from report.passport import check_files
from report.read import RunFiles, read_run
from report.theme import figure_style, to_png, to_svg
from report.warnings import find_warnings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, PICTURES = "report.html", "report"
MOST_HASHED = 2 * 2**30  # bytes of corpora that a report reads for the passport; above this `launch.py passport` does


def write_report(run: str | Path, against: Sequence[str | Path] = (), *, root: Path = RUNS) -> Path:
    """Write runs/NAME/report.html and runs/NAME/report/*.png. A run may be unfinished or miss files.

    Args:
        run: NAME or runs/NAME.
        against: runs whose validation is drawn beside this one's.
        root: folder of runs.

    Returns:
        the page's path.

    Raises:
        UserError: one of the runs does not exist.
    """
    files, *others = [read_run(find_run(name, root)) for name in (run, *against)]
    page = render(_collect(files, [(other, compute_changes(other)) for other in others]))
    target = files.run.path / PAGE
    write_atomic(target, page.encode(errors="replace").decode())  # JSON may hold surrogates, which UTF-8 has not
    return target


def _collect(files: RunFiles, others: list[tuple[RunFiles, list[DomainChange]]]) -> ReportData:
    changes, tokens = compute_changes(files), compute_tokens(files)
    quick = count_data_bytes(files.records.get("data.json", {}), files.run.path.parent.parent) > MOST_HASHED
    runs = [(files, changes), *others]
    labels = label_runs([run_files for run_files, _ in runs])
    different = {other.run.path.as_posix(): describe_other_base(files, other) for other, _ in others}
    different = {path: how for path, how in different.items() if how}
    for path in different:
        labels[path] += " (another base)"
    return ReportData(
        files=files,
        changes=changes,
        tokens=tokens,
        throughput=compute_throughput(files),
        warnings=[
            *(f"{Path(path).name} began with another model: {how}." for path, how in different.items()),
            *find_warnings(files, changes, tokens),
        ],
        passport=check_files(files, quick=quick),
        figures=_draw(files, [(labels[f.run.path.as_posix()], c) for f, c in runs]),
        others=others,
        attempts=read_attempts(files.run),
        other_bases=different,
        evaluation=newest_evaluation(files.run),
    )


def _draw(files: RunFiles, runs: LabelledChanges) -> dict[str, list[str]]:
    """Draw the figures, replace the PNGs of an earlier report, and return the SVGs by name."""
    folder = files.run.path / PICTURES
    folder.mkdir(exist_ok=True)
    for name in FIGURES:
        (folder / f"{name}.png").unlink(missing_ok=True)
    with figure_style():
        figures = draw_figures(files, runs, compute_tokens(files))
        for name, versions in figures.items():
            to_png(versions[0], folder / f"{name}.png")
        return {name: _to_svgs(name, versions) for name, versions in figures.items()}


def _to_svgs(name: str, versions: list[Figure]) -> list[str]:
    screens = ("wide", "narrow") if len(versions) == 2 else ("",)
    return [to_svg(figure, name, screen) for figure, screen in zip(versions, screens, strict=True)]
