"""The command `pilot`: make the trainings, and print the recommendation with the command that follows it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy

from common.commands import launch_command
from planning.page import name_and_text
from planning.pilot import PilotFolder, choose_objective, keep_pilot, open_folder, train_all
from planning.pilot_design import MOST_CONTINUED, Design, make_design, rate_overrides
from planning.pilot_fit import Objective, Recommendation, Result, Surface, continue_results, fit_surface, recommend
from planning.pilot_request import PilotRequest
from recipes.overrides import parse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NO_NUMBERS = "continued further than was ever compared with a run: read the order of the points, not their numbers"
COLOURS = ("#3b82c4", "#d9811f", "#8b6cc9", "#1fa2a6", "#c9609f")


def run_pilot(request: PilotRequest) -> None:
    """Make a pilot, keep and print it.

    Raises:
        ProjectError: as `make_design`, `open_folder`, `train_all` and `recommend`.
    """
    design = make_design(request)
    folder = open_folder(request, design)
    _say("\n".join(describe_trainings(design)))
    results = []
    for number, (_, result, seconds) in enumerate(train_all(design, folder), start=1):
        took = "kept from before" if seconds is None else f"{seconds:.0f} s"
        _say(f"{number} of {len(design.trainings)}: {describe_result(result)} ({took})")
        results.append(result)
    plan = design.plan
    objective = choose_objective(design, results, request.max_forgetting)
    continued = continue_results(results, plan.max_steps)
    found = recommend(continued, plan.max_lr, design.share, objective)
    command = follow_command(request, design, found)
    row = keep_pilot(design, folder, results, objective, found, command)
    finite = [one for one in continued if all(map(math.isfinite, one.changes.values()))]
    note = "" if design.gives_numbers else NO_NUMBERS
    draw_pilot(finite, fit_surface(finite, plan.max_lr, design.share), found, folder, note)
    if request.json:
        print(json.dumps(row, indent=1))
        return
    print("\n".join(line.rstrip() for line in format_recommendation(design, objective, found)))
    print("\n".join(name_and_text("kept", f"{folder.file}, {folder.picture}")))
    print(f"\n{command}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_trainings(design: Design) -> Iterator[str]:
    """What will be trained."""
    lengths = " or ".join(str(steps) for steps in sorted({one.steps for one in design.trainings}))
    total = sum(one.steps for one in design.trainings)
    yield from name_and_text(
        "pilot",
        f"{len(design.trainings)} trainings of {lengths} steps, the whole schedule in each: {total} steps,"
        f" {design.budget:.1%} of the run's {design.plan.max_steps}",
    )
    yield from _describe_left_out(design)


def _describe_left_out(design: Design) -> Iterator[str]:
    if design.left_out:
        yield from name_and_text("left out", f"{design.left_out}, for which the budget is too small")


def describe_result(one: Result) -> str:
    """One training and the changes it came to."""
    changes = ", ".join(f"{name} {_signed(change)}" for name, change in one.changes.items())
    share = "" if one.share is None else f", replay {one.share:.1%}"
    return f"lr {one.rate:g}{share}, {one.steps} steps: {changes}"


def format_recommendation(design: Design, objective: Objective, found: Recommendation) -> Iterator[str]:
    """The lines of the recommendation."""
    low, high = found.rate_range
    yield from name_and_text("objective", f"{objective.describe()}, after {design.plan.max_steps} steps")
    yield from name_and_text(
        "recommended",
        f"peak learning rate {found.rate:.2g} (between {low:.2g} and {high:.2g} when one training is left out);"
        f" the recipe has {design.plan.max_lr:g}",
    )
    if found.share is not None and found.share_range is not None and design.share is not None:
        low, high = found.share_range
        yield from name_and_text(
            "", f"replay share {found.share:.1%} (between {low:.1%} and {high:.1%}); the recipe has {design.share:.1%}"
        )
    yield from name_and_text("expected", _describe_expected(design, found))
    yield from name_and_text(
        "caution",
        f"continued from {design.steps // 2} and {design.steps} steps to {design.plan.max_steps}: expect the order of"
        " the settings to be right rather than the numbers (docs/pilot.md says what was measured)",
    )
    yield from _describe_left_out(design)
    for note in found.notes:
        yield from name_and_text("note", note)


def _describe_expected(design: Design, found: Recommendation) -> str:
    """The changes after the run, unless they would be continued further than was ever compared with a run."""
    if not design.gives_numbers:
        enough = design.numbers_from
        return (
            f"no numbers: the run is {design.plan.max_steps / design.steps:.1f} times as long as the longest training,"
            f" and how far off they are was measured up to {MOST_CONTINUED} times"
            + (" (no budget is enough for so many points)" if enough is None else f" (--budget {enough}%)")
        )
    low, high = found.gain_range
    changes = "; ".join(
        f"{name} {_signed(change)} instead of {_signed(found.recipe_changes[name])}"
        for name, change in found.changes.items()
    )
    return f"{changes} nats per token; better by {_signed(found.gain)} ({_signed(low)} to {_signed(high)})"


def follow_command(request: PilotRequest, design: Design, found: Recommendation) -> str:
    """The training that the recommendation asks for, as it is typed."""
    words = [*rate_overrides(design.plan, float(f"{found.rate:.2g}"))]
    if found.share is not None:
        words.append(f"data.replay_share={found.share:.3f}")
    replaced = {one.path for one in parse(words)}
    kept = [str(one) for one in parse(request.overrides or ()) if one.path not in replaced]
    options = {
        "--profile": request.profile,
        "--tokens": request.tokens,
        "--epochs": request.epochs,
        "--tokens-per-step": request.tokens_per_step,
        "--memory-profile": request.memory_profile,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, f"{value}")]
    return launch_command("--recipe", request.recipe, *given, *kept, *words)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "\u2212")


def draw_pilot(results: list[Result], surface: Surface, found: Recommendation, folder: PilotFolder, note: str) -> None:
    """Draw the change of each domain over the learning rate: points, fitted curves and the recommendation.

    The note stands above the picture.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(surface.coefficients)
    figure = Figure(figsize=(1.5 + 4.6 * len(names), 3.8), dpi=120, layout="constrained")
    panels = FigureCanvasAgg(figure).figure.subplots(1, len(names), squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=True):
        _draw_domain(axes, name, results, surface, found)
    figure.suptitle(note, fontsize="small")
    panels[-1].legend(fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(folder.picture, format="png")


def _draw_domain(axes: Axes, name: str, results: list[Result], surface: Surface, found: Recommendation) -> None:
    tried = [one.rate for one in results]
    rates = numpy.geomspace(min(tried), max(tried), 60)
    known = sorted({one.share for one in results if one.share is not None})
    shares: list[float | None] = [*known] or [None]
    for share, colour in zip(shares, COLOURS * len(shares), strict=False):
        points = [(one.rate, one.changes[name]) for one in results if one.share == share]
        label = "trainings" if share is None else f"replay {share:.1%}"
        axes.plot(*zip(*points, strict=True), "o", color=colour, label=label)
        row = None if share is None else numpy.full_like(rates, share)
        axes.plot(rates, surface.changes(rates, row)[name], color=colour, linewidth=1.4)
    axes.plot([found.rate], [found.changes[name]], "*", color="crimson", markersize=13, label="recommended", zorder=3)
    axes.plot([surface.rate], [found.recipe_changes[name]], "D", color="black", markersize=5, label="recipe", zorder=3)
    axes.axhline(0, color="#6b7381", linewidth=0.8)
    axes.set(xscale="log", title=name, xlabel="peak learning rate", ylabel="change, nats per token")
    axes.set_xticks(sorted(set(tried)), [f"{rate:g}" for rate in sorted(set(tried))])
    axes.set_xticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)
