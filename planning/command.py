"""The command `plan`: print a plan as text or JSON, draw the learning rate, train 20 steps if asked."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import EXIT_PREFLIGHT, UserError

if TYPE_CHECKING:
    from planning.request import PlanRequest


def show_plan(request: PlanRequest) -> int:
    """Print the plan.

    Returns:
        the exit code: 0, or 3 if the run would be refused.

    Raises:
        UserError: the picture cannot be written, or what `make_plan` refuses.
    """
    from planning.json_row import to_row
    from planning.page import format_plan
    from planning.plan import make_plan

    if request.picture is not None:
        check_picture(request.picture)
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


def check_picture(path: Path) -> None:
    """Check that a PNG can be written.

    Raises:
        UserError: the file has another ending, its folder does not exist or cannot be written to, or it is a folder.
    """
    if path.suffix.lower() != ".png":
        found = f"{path}, which does not end in .png"
    elif path.is_dir():
        found = f"{path} is a folder"
    elif not path.parent.is_dir():
        found = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        found = f"no permission to write {path}"
    else:
        return
    raise UserError("--picture cannot be written", expected="a PNG file", found=found, do="--picture learning-rate.png")


def _finite(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
