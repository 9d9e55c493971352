"""`report RUN`: one self-contained HTML page and PNGs, from what the run directory holds, whole or not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from common.rundir import RUNS, RunDir
from report import details
from report import page as parts
from report import passport as passports
from report.facts import Change, changes, replay, speed
from report.figures import FIGURES, Compared, draw
from report.html import el, page
from report.passport_data import data_bytes
from report.read import RunFiles, open_run, read
from report.style import CSS
from report.theme import style, to_png, to_svg
from report.warnings import warnings

PAGE, PICTURES = "report.html", "report"
HASHED = 2 * 2**30  # bytes of corpora that a report reads for the passport; above this the passport command does


def report(run: RunDir | str, against: Sequence[RunDir | str] = (), *, root: Path = RUNS) -> Path:
    """Write runs/NAME/report.html and runs/NAME/report/*.png.

    Args:
        run: the run's directory, or its name under `root`.
        against: runs whose per-domain validation is drawn over this one's.
        root: folder of runs.

    Returns:
        the page's path.

    Raises:
        UserError: one of the runs does not exist.
    """
    folders = [open_run(one, root) for one in (run, *against)]
    files, *others = [read(folder) for folder in folders]
    compared = [(other, changes(other)) for other in others]
    target = files.run.path / PAGE
    part = target.with_suffix(".html.tmp")
    part.write_text(_page(files, compared), encoding="utf-8", errors="replace")
    return part.replace(target)


def _page(files: RunFiles, against: list[tuple[RunFiles, list[Change]]]) -> str:
    own, blend = changes(files), replay(files)
    manifests = files.records.get("data.json", {})
    quick = data_bytes(manifests, files.run.path.parent.parent) > HASHED
    names = parts.labels([files, *(other for other, _ in against)])
    compared = [(names[f.run.path.as_posix()], c) for f, c in [(files, own), *against]]
    story = parts.Story(
        files=files,
        changes=own,
        blend=blend,
        speed=speed(files),
        warnings=warnings(files, own, blend),
        passport=passports.of_files(files, quick=quick),
        svg=_figures(files, compared),
        against=against,
    )
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sections = (parts.domains, parts.comparison, parts.consumption, details.curves, details.performance,
                details.passport, details.numbers, details.environment, details.origin)  # fmt: skip
    foot = el("footer", f"Made {made} from the files of the run; no recipe was read.")
    return page(f"{files.run.name} · report", CSS, parts.top(story), [make(story) for make in sections], foot)


def _figures(files: RunFiles, compared: Compared) -> dict[str, str]:
    """Draw, save the PNGs (those of an earlier report go), and return the SVGs by name."""
    folder = files.run.path / PICTURES
    folder.mkdir(exist_ok=True)
    with style():
        drawn = draw(files, compared, replay(files))
        for name in FIGURES:
            (folder / f"{name}.png").unlink(missing_ok=True)
        for name, figure in drawn.items():
            to_png(figure, folder / f"{name}.png")
        return {name: to_svg(figure, name) for name, figure in drawn.items()}
