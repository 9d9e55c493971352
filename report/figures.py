"""Draw the figures of a report; each function returns a matplotlib figure, or None if there is no data for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from common.domain_losses import STANDARD_ERRORS
from report.analysis import DomainChange, DomainTokens, baseline_name, get_series, smooth
from report.budget import budget_limits, share_curve
from report.forecast import draw_forecast
from report.read import RunFiles
from report.theme import (
    DASHES,
    FORGOTTEN,
    INK,
    LEARNED,
    PALETTE,
    canvas,
    label_ends,
    signed_tick,
    thin_out,
    thousands,
    tick,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = (
    *("validation", "forecast", "budget", "share", "loss", "lr"),
    *("grad_norm", "replay", "throughput", "memory", "power"),
)
WIDE, NARROW = 10.8, 5.2  # inches: the full width of the page, and half of it or a phone's screen
LabelledChanges = list[tuple[str, list[DomainChange]]]  # (label of a run, its changes)


def draw_figures(files: RunFiles, runs: LabelledChanges, tokens: list[DomainTokens]) -> dict[str, list[Figure]]:
    """Every figure for which there is data, by name; a full-width figure comes twice, for wide and for narrow screens.

    Args:
        runs: the run itself and those it is compared with.
    """
    baseline = baseline_name(files, [c for _, changes in runs for c in changes])
    figures = {
        "validation": [draw_validation(runs, baseline, width) for width in (WIDE, NARROW)],
        "forecast": [draw_forecast(files, WIDE, 3.4, beside=True), draw_forecast(files, NARROW, 2.8, beside=False)],
        "budget": [draw_budget(files, runs[0][1])],
        "share": [draw_replay_share(files)],
        "loss": [draw_loss(files, width) for width in (WIDE, NARROW)],
        "lr": [draw_column(files, "lr", "learning rate")],
        "grad_norm": [draw_column(files, "grad_norm", "gradient norm")],
        "replay": [draw_shares(tokens, width) for width in (WIDE, NARROW)],
        "throughput": [draw_column(files, "tokens_per_second", "tokens/s")],
        "memory": [draw_column(files, "memory_gib", "GiB")],
        "power": [draw_power(files.system.power)],
    }
    drawn = {name: [figure for figure in versions if figure] for name, versions in figures.items()}
    return {name: versions for name, versions in drawn.items() if versions}


def draw_validation(runs: LabelledChanges, baseline: str, width: float) -> Figure | None:
    """Per-domain validation of one or more runs relative to `baseline`: above zero forgotten, below learned."""
    domains = list(dict.fromkeys(c.domain for _, changes in runs for c in changes if len(c.curve) > 1))
    if not domains:
        return None
    figure, axes = canvas(width, (4.8 if len(runs) == 1 else 5.6) if width == WIDE else 4.2)
    ends = []
    for index, (label, changes) in enumerate(runs):
        for c in changes:
            if c.domain not in domains or not c.curve:
                continue
            colour = PALETTE[domains.index(c.domain) % len(PALETTE)]
            steps, deltas = [s for s, _ in c.curve], [d for _, d in c.curve]
            few = "o" if len(steps) < 40 else ""
            if any(c.curve_errors):
                room = [STANDARD_ERRORS * error for error in c.curve_errors]
                low, high = ([d + sign * r for d, r in zip(deltas, room, strict=True)] for sign in (-1, 1))
                axes.fill_between(steps, low, high, color=colour, alpha=0.13, linewidth=0)
            axes.plot(steps, deltas, color=colour, linestyle=DASHES[index % len(DASHES)], marker=few, markersize=3.2)
            separator = " · " if width == WIDE else "\n"
            text = f"{c.domain} {signed_tick(deltas[-1], 2)}" + (f"{separator}{label}" if len(runs) > 1 else "")
            ends.append((deltas[-1], text, colour))
    _shade_sides(axes, baseline)
    axes.set_xlabel("step")
    thousands(axes.xaxis)
    two_lines = width != WIDE and len(runs) > 1
    label_ends(axes, ends, gap=0.14 if two_lines else 0.06)
    return figure


def _shade_sides(axes: Axes, baseline: str) -> None:
    """Draw the zero line, and say what its two sides mean."""
    low, high = axes.get_ylim()
    room = 0.08 * (high - low)
    low, high = min(low, 0.0) - room, max(high, 0.0) + room  # room for the two words beside the curves
    axes.set_ylim(low, high)
    axes.axhspan(0, high, color=FORGOTTEN, alpha=0.06, linewidth=0)
    axes.axhspan(low, 0, color=LEARNED, alpha=0.06, linewidth=0)
    axes.axhline(0, color=INK, linewidth=1.2)
    axes.margins(x=0.01)
    inside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontweight": "bold"}
    axes.text(0.012, high - room / 3, "forgotten \u2191", color=FORGOTTEN, va="top", **inside)
    axes.text(0.012, low + room / 3, "learned \u2193", color=LEARNED, va="bottom", **inside)
    name = "base" if baseline == "base model" else "start"
    axes.yaxis.set_major_formatter(lambda value, _: signed_tick(value) if abs(value) > 1e-9 else name)
    axes.set_ylabel(f"nats per token, relative to the {baseline}")


def draw_budget(files: RunFiles, changes: list[DomainChange]) -> Figure | None:
    """Each domain with a forgetting budget relative to its loss at step 0, and the budget as a line."""
    limits = budget_limits(files)
    shown = [change for change in changes if change.domain in limits and change.curve]
    if not shown:
        return None
    figure, axes = canvas(NARROW, 2.6)
    ends = []
    for change in shown:
        colour, limit = PALETTE[changes.index(change) % len(PALETTE)], limits[change.domain]
        axes.plot(*zip(*change.curve, strict=True), color=colour)
        axes.axhline(limit, color=colour, linestyle="--", linewidth=1.2)
        ends.append((change.curve[-1][1], change.domain, colour))
        ends.append((limit, f"budget {limit:g}", colour))
    axes.axhline(0, color=INK, linewidth=1.0)
    axes.set_xlabel("step")
    axes.set_ylabel("nats above step 0")
    thousands(axes.xaxis)
    label_ends(axes, ends, gap=0.11)
    return figure


def draw_replay_share(files: RunFiles) -> Figure | None:
    """The replay share that a forgetting budget decided, by the step from which it was read."""
    points = share_curve(files)
    if len(points) < 2:
        return None
    figure, axes = canvas(NARROW, 2.6)
    steps, shares = [step for step, _ in points], [share for _, share in points]
    axes.step(steps, shares, where="post", color=PALETTE[1])
    axes.set_ylim(0, 1.12 * max(shares))
    axes.set_xlabel("step")
    axes.set_ylabel("replay share")
    thousands(axes.xaxis)
    label_ends(axes, [(shares[-1], f"{shares[-1]:.1%}", PALETTE[1])])
    return figure


def draw_loss(files: RunFiles, width: float) -> Figure | None:
    """The training loss behind its running average."""
    steps, values = get_series(files.train, "loss")
    if not steps:
        return None
    figure, axes = canvas(width, 3.4 if width == WIDE else 2.8)
    average = smooth(values)
    axes.plot(*thin_out(steps, values), color=PALETTE[0], alpha=0.35, linewidth=1.0)
    axes.plot(*thin_out(steps, average), color=PALETTE[0])
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    thousands(axes.xaxis)
    label_ends(axes, [(average[-1], f"{average[-1]:.3f}", PALETTE[0])])
    return figure


def draw_column(files: RunFiles, key: str, name: str) -> Figure | None:
    """One column of metrics.jsonl over the steps."""
    steps, values = get_series(files.train, key)
    if not steps:
        return None
    figure, axes = canvas(NARROW, 2.6)
    colour = PALETTE[{"lr": 2, "grad_norm": 6, "memory_gib": 4}.get(key, 3)]
    axes.plot(*thin_out(steps, values), color=colour, marker="o" if len(steps) == 1 else "")
    axes.set_ylim(0, 1.12 * max(values) or 1.0)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    thousands(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    return figure


def draw_power(samples: list[tuple[float, float]]) -> Figure | None:
    """Watts of the first node's GPUs over the hours."""
    if not samples:
        return None
    figure, axes = canvas(NARROW, 2.6)
    hours, watts = [hour for hour, _ in samples], [watt for _, watt in samples]
    axes.plot(*thin_out(hours, watts), color=PALETTE[5], marker="o" if len(hours) == 1 else "")
    axes.set_ylim(0, 1.12 * max(watts) or 1.0)
    axes.set_xlabel("hours")
    axes.set_ylabel("watts")
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    return figure


def draw_shares(tokens: list[DomainTokens], width: float) -> Figure | None:
    """Two bars of tokens by domain: planned and consumed."""
    rows = {
        "planned": [t.planned_share for t in tokens],
        "consumed": [t.consumed_share for t in tokens],
    }
    rows = {name: values for name, values in rows.items() if any(values)}
    if not rows:
        return None
    figure, axes = canvas(width, 0.75 + 0.55 * len(rows))
    for line, values in enumerate(rows.values()):
        left = 0.0
        for index, (t, value) in enumerate(zip(tokens, values, strict=True)):
            share = value or 0.0
            axes.barh(line, share, left=left, height=0.72, color=PALETTE[index % len(PALETTE)])
            if share > 0.7 / width:  # there is room for a number
                text = f"{t.domain} {share:.1%}" if share > 1.6 / width else f"{share:.0%}"
                axes.text(left + share / 2, line, text, color="white", ha="center", va="center", fontweight="bold")
            left += share
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    return figure
