"""The picture of a learning-rate schedule before a run: as a PNG, or as rows of text."""

from __future__ import annotations

from pathlib import Path

from recipes.schedules import Schedule

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sketch(schedule: Schedule, max_steps: int, width: int = 60, height: int = 4) -> list[str]:
    """Draw lr over the steps of a run of `max_steps` as `height` rows of bars; the highest bar is the peak."""
    width = min(width, max_steps)
    steps = [min(max_steps - 1, round(i * (max_steps - 1) / max(1, width - 1))) for i in range(width)]
    levels = [round(schedule.lr(step) / schedule.max_lr * 8 * height) for step in steps]
    rows = range(height - 1, -1, -1)
    return ["".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels).rstrip() for row in rows]


def plot(schedule: Schedule, max_steps: int, path: Path) -> None:
    """Draw lr over the steps of a run of `max_steps` into a PNG at `path`, phases shaded, the fork marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), dpi=120, layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    every = max(1, max_steps // 4000)
    borders = {phase.first for phase in schedule.phases() if phase.first < max_steps}
    steps = sorted({*range(0, max_steps, every), max_steps - 1, *borders})
    axes.plot(steps, [schedule.lr(step) for step in steps], color="black", linewidth=1.4)
    colours = {
        "warm-up": "#f2b84b",
        "stable": "#7fb7e6",
        "constant": "#7fb7e6",
        "cooldown": "#c9a3d9",
        "decay": "#8fc98f",
    }
    for phase in schedule.phases():
        if phase.first < max_steps:
            last = max_steps if phase.end is None else min(phase.end, max_steps)
            label = f"{phase.name}: {phase.first} to {last}"
            axes.axvspan(phase.first, last, color=colours.get(phase.name, "#dddddd"), alpha=0.35, lw=0, label=label)
    fork = getattr(schedule, "fork_step", None)
    if fork is not None and fork < max_steps:
        axes.axvline(fork, color="crimson", linestyle="--", linewidth=1, label=f"fork: {fork}")
    axes.set(
        xlabel="optimizer step",
        ylabel="learning rate",
        xlim=(0, max_steps),
        title=f"{schedule.kind}, {max_steps} steps",
    )
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, format="png")
