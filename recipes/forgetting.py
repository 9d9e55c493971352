"""Checks of a plan's forgetting budget, before NeMo is imported. What it does: data/budget.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.errors import UserError, unknown_name
from data.blend import Blend
from data.budget import BOUNDS, Budget, make_budget
from recipes.plan import Plan

_OPTION = "data.forgetting_budget"
_EXAMPLE = "\"forgetting_budget={'prose': 0.03}\""


def plan_budget(plan: Plan) -> Budget | None:
    """The budget of a plan; None where it has none."""
    return make_budget(plan.forgetting_budget, plan.replay_bounds)


def check_budget(plan: Plan, blend: Blend | None) -> None:
    """Check that the budget of a plan can be kept: numbers, domains, and a validation to decide by.

    Args:
        blend: of the plan; None where it has none.

    Raises:
        UserError: the first problem.
    """
    for problem in _problems(plan, blend):
        raise problem


def _problems(plan: Plan, blend: Blend | None) -> Iterator[UserError]:
    if plan.forgetting_budget is None:
        if plan.replay_bounds is not None:
            do = f"leave data.replay_bounds out, or {_EXAMPLE}"
            yield UserError("bounds without a budget", expected=_OPTION, found=f"{plan.replay_bounds}", do=do)
        return
    yield from _wrong_numbers(plan)
    if blend is None:
        do = "data.blend=FILE.yaml with a domain of role replay (docs/blend.md)"
        yield UserError("a forgetting budget without a blend", expected="data.blend", found="data.paths", do=do)
        return
    yield from _wrong_domains(plan, blend)
    if not plan.limit_val_batches or plan.val_check_interval >= plan.max_steps:
        yield UserError(
            "a forgetting budget without a validation to decide by",
            expected="trainer.limit_val_batches above 0, and trainer.val_check_interval below trainer.max_steps",
            found=f"{plan.limit_val_batches}, and every {plan.val_check_interval} of {plan.max_steps} steps",
            do=f"trainer.limit_val_batches={plan.limit_val_batches or 4}"
            f" trainer.val_check_interval={min(plan.val_check_interval, max(1, plan.max_steps // 10))}",
        )


def _wrong_numbers(plan: Plan) -> Iterator[UserError]:
    limits = plan.forgetting_budget
    numbers = limits.values() if isinstance(limits, dict) else ()
    if not limits or not all(_is_number(one) and one > 0 for one in numbers) or not isinstance(limits, dict):
        yield UserError(
            "the forgetting budget is out of range",
            expected="domain -> nats per token above its loss at step 0, each above 0",
            found=f"{_OPTION}={limits}",
            do=_EXAMPLE,
        )
    bounds = plan.replay_bounds if plan.replay_bounds is not None else list(BOUNDS)
    if len(bounds) != 2 or not all(map(_is_number, bounds)) or not 0 < bounds[0] < bounds[1] < 1:
        yield UserError(
            "the bounds of the replay share are out of range",
            expected="two shares, 0 < lower < upper < 1",
            found=f"data.replay_bounds={bounds}",
            do=f"data.replay_bounds={list(BOUNDS)}",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _wrong_domains(plan: Plan, blend: Blend) -> Iterator[UserError]:
    roles = {domain.name: domain.role for domain in blend.domains}
    for name in plan.forgetting_budget or ():
        if name not in roles:
            known = [one for one, role in roles.items() if role != "new"]
            yield unknown_name("domain in the forgetting budget", name, known, f"one of {', '.join(known)}")
        elif roles[name] == "new":
            yield UserError(
                f"{name} is to be learned, and has a forgetting budget",
                expected="a domain of role replay or watch",
                found="role: new",
                do=f"leave {name} out of {_OPTION}",
            )
    if "replay" not in roles.values() or "new" not in roles.values():
        yield UserError(
            "there is no replay share to change",
            expected="a domain of role new and one of role replay",
            found=", ".join(f"{name} ({role})" for name, role in roles.items()),
            do="add a domain with role: replay, whose text is like what is not to be forgotten",
        )
    if own := [stage.name or "without a name" for stage in blend.stages if stage.replay_share is not None]:
        yield UserError(
            "the forgetting budget and a stage both say how much is replayed",
            expected="stages without replay_share: the budget changes the share in all of them",
            found=f"replay_share in stage {', '.join(own)}",
            do=f"leave replay_share out of the stages, or {_OPTION} out of the run",
        )
