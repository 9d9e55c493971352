"""Render the report of a run: templates/report.html.j2 with these numbers and formats. Every text is escaped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from common.domain_losses import STANDARD_ERRORS, format_change
from common.quantities import format_duration
from report import theme
from report.analysis import (
    DomainChange,
    DomainTokens,
    Throughput,
    baseline_name,
    get_progress,
    get_series,
    planned_replay_share,
)
from report.attempts import Attempt
from report.configuration import configuration_tables
from report.evaluation.comparison import RULE
from report.evaluation.result import Evaluation
from report.forecast import forecast_rows
from report.ledger import stage_rows
from report.passport import Passport
from report.read import RunFiles

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
NONE = "\u2014"  # shown for a value that is not recorded
COLOURS = {"learned": "learned", "forgotten": "forgotten", "not a number": "broken"}  # verdict -> CSS class


@dataclass(frozen=True)
class ReportData:
    """Everything that the page shows: one run, read and analysed, and the runs it is compared with.

    Args:
        figures: name of a figure -> its SVGs (one, or one for wide and one for narrow screens).
        others: the runs it is compared with, and the changes of each.
        attempts: the starts of the run.
        other_bases: path of a compared run that began with another model -> how that model differs.
        evaluation: the newest one, None if the run was not evaluated.
    """

    files: RunFiles
    changes: list[DomainChange]
    tokens: list[DomainTokens]
    throughput: Throughput
    warnings: list[str]
    passport: Passport
    figures: dict[str, list[str]]
    others: list[tuple[RunFiles, list[DomainChange]]]
    attempts: list[Attempt]
    other_bases: dict[str, str]
    evaluation: Evaluation | None


def render(data: ReportData) -> str:
    """The whole page as HTML, without scripts or outside resources."""
    labels = label_runs([data.files, *(files for files, _ in data.others)])
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            data=data,
            files=data.files,
            figures=data.figures,
            progress=get_progress(data.files),
            baseline=baseline_name(data.files, data.changes),
            largest=max((abs(c.delta) for c in data.changes if math.isfinite(c.delta)), default=0.0) or 1.0,
            runs=[(data.files, data.changes), *data.others],
            lines=[f"{name}: {label}" for name, label in zip(theme.DASH_NAMES, labels.values(), strict=False)],
            memory_kind=memory_kind(data.files),
            replay_share=planned_replay_share,
            standard_errors=STANDARD_ERRORS,
            key_facts=key_facts(data),
            stages=stage_rows(data.files),
            forecasts=forecast_rows(data.files),
            configuration=configuration_tables(data.files),
            theme=theme,
            rule=RULE[:1].upper() + RULE[1:] + ".",
            made=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        )
    )


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bar_width": bar_width,
        "signed": signed,
        "short": short,
        "decimal": decimal,
        "percent": percent,
        "difference": lambda change: format_change(change.delta, change.error, 3),
        "colour": lambda change: COLOURS.get(change.verdict, "plain"),
        "svg": Markup,  # figures are made by report/theme.py; matplotlib escapes the texts in them
    }
    return environment


def signed(value: float | None, digits: int = 2) -> str:
    """+0.42, with a real minus sign for negative numbers."""
    if value is None:
        return NONE
    return "NaN" if math.isnan(value) else f"{value:+.{digits}f}".replace("-", "\u2212")


def decimal(value: float | None, digits: int = 3) -> str:
    """1.250."""
    return NONE if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of 1 as 25.0%."""
    return NONE if share is None else f"{share:.{digits}%}"


def short(value: float | None, unit: str = "") -> str:
    """A number of three digits with a K, M, B or T."""
    if value is None:
        return NONE
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}{unit}"
    return f"{value:.3g}{unit}"


def duration(seconds: float | None) -> str:
    """In its two largest units, as 2 h 05 min."""
    return NONE if seconds is None else format_duration(seconds)


def bar_width(change: DomainChange, largest: float) -> str:
    """Width of a bar that starts in the middle, in percent: the largest difference takes half."""
    return "0" if math.isnan(change.delta) else f"{50 * min(1.0, abs(change.delta) / largest):.1f}"


def key_facts(data: ReportData) -> list[tuple[str, str, str]]:
    """(name, value, detail) of the numbers under the headline; unrecorded ones are left out."""
    throughput = data.throughput
    losses = get_series(data.files.train, "loss")[1]
    tokens = get_series(data.files.train, "unmasked_tokens")[1]
    states = [item.state for item in data.passport.items]
    passed, failed, unknown = states.count("pass"), states.count("fail"), states.count("unknown")
    not_passed = ", ".join(f"{n} {name}" for n, name in ((failed, "failed"), (unknown, "unknown")) if n)
    facts = [
        ("training loss", f"{losses[-1]:.3f}" if losses else NONE, f"from {losses[0]:.3f}" if losses else ""),
        ("tokens trained", short(tokens[-1] if tokens else None), f"in {duration(throughput.elapsed_s)}"),
        ("tokens per second", short(throughput.tokens_per_second), "median"),
        ("step time, median", short(throughput.step_p50, " s"), f"p99 {short(throughput.step_p99, ' s')}"),
        ("peak memory", short(throughput.memory_gib, " GiB"), memory_kind(data.files)),
        ("energy", short(data.files.system.energy_kwh, " kWh"), "of the GPUs"),
        ("passport", f"{passed} of {passed + failed + unknown}", not_passed or "all passed"),
    ]
    return [fact for fact in facts if fact[1] != NONE or fact[0] == "training loss"]


def memory_kind(files: RunFiles) -> str:
    """What the recorded memory is: a GPU's, or on a CPU the process's."""
    return "process on the CPU" if files.at("trainer.accelerator") == "cpu" else "reserved on the GPU"


def label_runs(runs: list[RunFiles]) -> dict[str, str]:
    """A label for each run (path -> label): its share of replay if all differ in it, else its name."""
    shares = [planned_replay_share(files) for files in runs]
    if None not in shares and len({f"{s:.0%}" for s in shares}) == len(runs):
        return {f.run.path.as_posix(): f"{s:.0%} replay" for f, s in zip(runs, shares, strict=True)}
    names = [files.run.name for files in runs]
    return {f.run.path.as_posix(): f.run.name if names.count(f.run.name) == 1 else str(f.run.path) for f in runs}
