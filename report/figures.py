"""The figures of a report: each takes what it shows and returns a matplotlib figure, or None if there is nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from report.facts import Change, Replay, series, smooth, zero
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
    thin,
    thousands,
    tick,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = ("validation", "loss", "lr", "grad_norm", "replay", "throughput", "memory")
Compared = list[tuple[str, list[Change]]]  # (label of the run, its changes)


def draw(files: RunFiles, compared: Compared, blend: list[Replay]) -> dict[str, Figure]:
    """Every figure for which there is data, by name."""
    drawn = {
        "validation": validation(compared, zero(files, [c for _, some in compared for c in some])),
        "loss": loss(files),
        "lr": column(files, "lr", "learning rate"),
        "grad_norm": column(files, "grad_norm", "gradient norm"),
        "replay": shares(blend),
        "throughput": column(files, "tokens_per_second", "tokens/s"),
        "memory": column(files, "memory_gib", "GiB"),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def validation(compared: Compared, origin: str) -> Figure | None:
    """Per-domain validation of one or more runs relative to `origin`, above zero forgotten, below learned."""
    domains = list(dict.fromkeys(c.domain for _, changes in compared for c in changes if len(c.curve) > 1))
    if not domains:
        return None
    figure, axes = canvas(10.8, 4.8 if len(compared) == 1 else 5.6)
    ends = []
    for index, (label, changes) in enumerate(compared):
        for c in changes:
            if c.domain not in domains or not c.curve:
                continue
            colour = PALETTE[domains.index(c.domain) % len(PALETTE)]
            steps, deltas = [s for s, _ in c.curve], [d for _, d in c.curve]
            few = "o" if len(steps) < 40 else ""
            axes.plot(steps, deltas, color=colour, linestyle=DASHES[index % len(DASHES)], marker=few, markersize=3.2)
            text = f"{c.domain} {signed_tick(deltas[-1], 2)}" + (f" · {label}" if len(compared) > 1 else "")
            ends.append((deltas[-1], text, colour))
    _sides(axes, origin)
    axes.set_xlabel("step")
    thousands(axes.xaxis)
    label_ends(axes, ends)
    return figure


def _sides(axes: Axes, origin: str) -> None:
    """The zero line and what its two sides mean."""
    low, high = axes.get_ylim()
    room = 0.08 * (high - low)
    low, high = min(low, -room), max(high, room)
    axes.set_ylim(low, high)
    axes.axhspan(0, high, color=FORGOTTEN, alpha=0.06, linewidth=0)
    axes.axhspan(low, 0, color=LEARNED, alpha=0.06, linewidth=0)
    axes.axhline(0, color=INK, linewidth=1.2)
    axes.margins(x=0.01)
    inside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "fontweight": "bold"}
    axes.text(0.012, high - room / 3, "forgotten \u2191", color=FORGOTTEN, va="top", **inside)
    axes.text(0.012, low + room / 3, "learned \u2193", color=LEARNED, va="bottom", **inside)
    name = origin if origin == "base" else "start"
    axes.yaxis.set_major_formatter(lambda value, _: signed_tick(value) if abs(value) > 1e-9 else name)
    axes.set_ylabel(f"nats a token, relative to the {origin}")


def loss(files: RunFiles) -> Figure | None:
    """Raw training loss behind its running average."""
    steps, values = series(files.train, "loss")
    if not steps:
        return None
    figure, axes = canvas(10.8, 3.4)
    average = smooth(values)
    axes.plot(*thin(steps, values), color=PALETTE[0], alpha=0.35, linewidth=1.0)
    axes.plot(*thin(steps, average), color=PALETTE[0])
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats a token")
    thousands(axes.xaxis)
    label_ends(axes, [(average[-1], f"{average[-1]:.3f}", PALETTE[0])])
    return figure


def column(files: RunFiles, key: str, name: str) -> Figure | None:
    """One column of metrics.jsonl over the steps."""
    steps, values = series(files.train, key)
    if not steps:
        return None
    figure, axes = canvas(5.2, 2.6)
    colour = PALETTE[{"lr": 2, "grad_norm": 6, "memory_gib": 4}.get(key, 3)]
    axes.plot(*thin(steps, values), color=colour, marker="o" if len(steps) == 1 else "")
    axes.set_ylim(0, 1.12 * max(values) or 1.0)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    thousands(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    return figure


def shares(blend: list[Replay]) -> Figure | None:
    """Two bars of tokens by domain: the plan, and what was read."""
    rows = {
        "planned": [r.planned_share for r in blend],
        "consumed": [r.consumed_share for r in blend],
    }
    rows = {name: values for name, values in rows.items() if any(values)}
    if not rows:
        return None
    figure, axes = canvas(10.8, 0.75 + 0.55 * len(rows))
    for line, values in enumerate(rows.values()):
        left = 0.0
        for index, (r, value) in enumerate(zip(blend, values, strict=True)):
            share = value or 0.0
            axes.barh(line, share, left=left, height=0.72, color=PALETTE[index % len(PALETTE)])
            if share > 0.07:
                text = f"{r.domain} {share:.1%}" if share > 0.16 else f"{share:.0%}"
                axes.text(left + share / 2, line, text, color="white", ha="center", va="center", fontweight="bold")
            left += share
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    return figure
