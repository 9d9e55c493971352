"""The stages of a plan's blend, resolved by its own length and learning rate, before NeMo is imported."""

from __future__ import annotations

from data.resolve_blend import load_run_blend
from data.resolve_stages import ResolvedStages, resolve_stages
from data.stages import RunLength
from recipes.forgetting import plan_budget
from recipes.plan import Plan


def run_length(plan: Plan) -> RunLength:
    """The numbers of a plan that decide where its stages end."""
    return RunLength(plan.max_steps, plan.global_batch_size, plan.seq_length, plan.learning_rate())


def resolve_plan_stages(plan: Plan) -> ResolvedStages:
    """What the blend of a plan comes to; a blend without stages has one.

    Args:
        plan: with a blend.

    Raises:
        UserError, PreflightError: as `data.resolve_stages.resolve_stages`.
    """
    assert plan.blend is not None
    return resolve_stages(plan.blend, run_length(plan), first_replay_share(plan))


def first_replay_share(plan: Plan) -> float | None:
    """The replay share that replaces the blend's own at the start of the run; None where the blend's stands."""
    budget = plan_budget(plan)
    if budget is None or plan.blend is None:
        return plan.replay_share
    return budget.clip(load_run_blend(plan.blend).replay_share if plan.replay_share is None else plan.replay_share)
