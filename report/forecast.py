"""The forecasts of a run (`launch.py forecast`) beside what came of them: rows of a table, and a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.json_files import read_json_object
from report.read import RunFiles, at, finite
from report.theme import INK, MUTED, PALETTE, thousands

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class ForecastRow:
    """One forecast of one domain; losses in nats per token.

    Args:
        step, num_steps: made from the part of the run until `step`, for `num_steps`.
        run_step: where the run was when it was made.
        hindsight: later validations were recorded then.
        low, high: interval of 95%.
        outcome: loss at `num_steps`; None while the run has not come there.
        earlier_runs: how many runs the law was learned from.
        curve: (step, loss, low, high) from `step` to the end.
    """

    domain: str
    made: str
    step: int
    num_steps: int
    run_step: int
    hindsight: bool
    loss: float
    low: float
    high: float
    outcome: float | None
    earlier_runs: int
    curve: tuple[tuple[float, float, float, float], ...]

    @property
    def error_percent(self) -> float | None:
        return None if self.outcome is None else 100 * (self.loss / self.outcome - 1)

    @property
    def inside(self) -> bool | None:
        """Whether the outcome lies in the interval."""
        return None if self.outcome is None else self.low <= self.outcome <= self.high


def forecast_rows(files: RunFiles) -> list[ForecastRow]:
    """Every forecast of every domain, in the order in which they were made; what cannot be read is left out."""
    found = (read_json_object(files.run.forecast) or {}).get("forecasts")
    rows = []
    for forecast in found if isinstance(found, list) else []:
        domains = at(forecast, "domains")
        for name, one in domains.items() if isinstance(domains, dict) else ():
            try:
                rows.append(_row(files, forecast, name, one))
            except (KeyError, TypeError, ValueError):
                continue
    return rows


def _row(files: RunFiles, forecast: dict[str, Any], name: str, one: dict[str, Any]) -> ForecastRow:
    last = int(forecast["num_steps"])
    outcome = dict(domain_points(files, name)).get(last)
    return ForecastRow(
        domain=str(name),
        made=str(forecast["made"]),
        step=int(forecast["step"]),
        num_steps=last,
        run_step=int(forecast["run_step"]),
        hindsight=bool(forecast["hindsight"]),
        loss=float(one["loss"]),
        low=float(one["low"]),
        high=float(one["high"]),
        outcome=outcome,
        earlier_runs=len(one["earlier_runs"]),
        curve=tuple((float(a), float(b), float(c), float(d)) for a, b, c, d in one["curve"]),
    )


def domain_points(files: RunFiles, domain: str) -> Points:
    """(step, loss) of every validation of a domain."""
    values = [(row["step"], at(row, "validation", {})) for row in files.validation]
    losses = [(step, finite(at(split.get(domain), "loss"))) for step, split in values if isinstance(split, dict)]
    return [(step, loss) for step, loss in losses if loss is not None]


def choose_drawn(rows: list[ForecastRow]) -> list[ForecastRow]:
    """One row per domain: the first that was made before the outcome was known, else the first."""
    chosen: dict[str, ForecastRow] = {}
    for row in sorted(rows, key=lambda row: row.hindsight):
        chosen.setdefault(row.domain, row)
    return list(chosen.values())


def draw_forecast(files: RunFiles, width: float, height: float, *, beside: bool) -> Figure | None:
    """What was known, the forecast with its interval, and what came of it; one panel per domain.

    Args:
        beside: the panels stand beside each other, else below.
    """
    from matplotlib.figure import Figure

    rows = choose_drawn(forecast_rows(files))
    if not rows:
        return None
    count = len(rows)
    figure = Figure(figsize=(width, height if beside else height * count))
    panels = figure.subplots(*((1, count) if beside else (count, 1)), squeeze=False).ravel()
    for axes, row, colour in zip(panels, rows, PALETTE * count, strict=False):
        _draw_panel(axes, row, domain_points(files, row.domain), colour)
    return figure


def _draw_panel(axes: Axes, row: ForecastRow, points: Points, colour: str) -> None:
    steps, losses, low, high = zip(*row.curve, strict=True)
    axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(steps, losses, color=colour, linestyle=(0, (5, 2)))
    for known, filled in ((True, colour), (False, "none")):
        part = [(s, loss) for s, loss in points if (s <= row.step) == known and s > 0]
        axes.plot(*zip(*part, strict=True), "o", color=colour, markerfacecolor=filled, markersize=4) if part else None
    axes.axvline(row.step, color=MUTED, linewidth=1)
    shown = [*low, *high, *(loss for s, loss in points if s >= row.step / 4)]
    room = 0.08 * (max(shown) - min(shown) or 1.0)
    axes.set_ylim(min(shown) - room, max(shown) + room)
    axes.set_xlim(0, 1.02 * row.num_steps)
    axes.set_title(row.domain, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    thousands(axes.xaxis)
