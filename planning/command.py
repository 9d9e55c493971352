"""The command `plan`: print a plan as text or JSON, draw the learning rate, train 20 steps if asked."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from common.errors import EXIT_PREFLIGHT

if TYPE_CHECKING:
    from planning.request import PlanRequest


def show_plan(request: PlanRequest) -> int:
    """Print the plan.

    Returns:
        the exit code: 0, or 3 if the run would be refused.
    """
    from planning.json_row import to_row
    from planning.page import format_plan
    from planning.plan import make_plan

    found = make_plan(request)
    if request.picture is not None:
        from recipes.curve import plot

        plot(found.plan.learning_rate(), found.plan.max_steps, request.picture)
        print(f"learning rate: {request.picture}", file=sys.stderr)
    if request.json:
        print(json.dumps(_finite(to_row(found)), indent=1))
    else:
        print(format_plan(found))
    return EXIT_PREFLIGHT if any(problem.fatal for problem in found.problems) else 0


def _finite(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
