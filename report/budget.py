"""What a run recorded of its forgetting budget: the limits, and the replay shares that followed from them."""

from __future__ import annotations

from report.read import RunFiles, at, finite


def budget_limits(files: RunFiles) -> dict[str, float]:
    """Domain -> nats per token above its loss at step 0; empty for a run without a budget."""
    found = files.at("data.forgetting_budget")
    rows = found.items() if isinstance(found, dict) else ()
    return {str(name): limit for name, value in rows if (limit := finite(value)) is not None}


def share_curve(files: RunFiles) -> list[tuple[int, float]]:
    """(step, replay share that is read from it on), from the start of the run to its newest validation."""
    points: list[tuple[int, float]] = []
    for row in files.validation:
        share, following = (finite(at(row, f"forgetting_budget.{key}")) for key in ("share", "next_share"))
        first = finite(at(row, "forgetting_budget.from_step"))
        if not points and share is not None:
            points.append((row["step"], share))
        if following is not None and first is not None:
            points.append((int(first), following))
    last = files.validation[-1]["step"] if files.validation else 0
    points = [point for point in points if point[0] <= last]
    return [*points, (last, points[-1][1])] if points else []
