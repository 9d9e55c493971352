"""From what the user asked for to one plan: the recipe's numbers, a profile, the overrides, in that order.

Depends on the spec alone: the same spec gives the same plan in the launcher and in every rank, whatever their
environment variables hold.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from common.commands import launch_command
from common.errors import UserError
from common.spec import RunSpec
from recipes import known_paths, limits, overrides, registry
from recipes.overrides import Override
from recipes.plan import Plan
from recipes.registry import Recipe

_BLEND = ("data.paths", "data.blend", "data.replay_share", "data.forgetting_budget", "data.replay_bounds")


@dataclass(frozen=True)
class Resolved:
    """A spec with its recipe, its overrides as parsed, and the plan they come to."""

    spec: RunSpec
    recipe: Recipe
    overrides: tuple[Override, ...]
    plan: Plan

    def with_spec(self, **fields: Any) -> Resolved:
        """Another executor, name, attempt or process-group backend; the overrides stay as they were parsed."""
        return _resolved(dataclasses.replace(self.spec, **fields), self.recipe, self.overrides)

    def with_overrides(self, *more: Override) -> Resolved:
        """The same with overrides that the launcher has chosen, recorded in the spec after the user's own."""
        spec = dataclasses.replace(self.spec, overrides=(*self.spec.overrides, *map(str, more)))
        return _resolved(spec, self.recipe, (*self.overrides, *more))

    def is_overridden(self, *paths: str) -> bool:
        """Whether one of `paths` is given on the command line (or was chosen by the launcher)."""
        return any(override.path in paths for override in self.overrides)


def resolve(asked: RunSpec | Resolved) -> Resolved:
    """The plan of a spec, before NeMo is imported; one that is resolved already is returned as it is.

    Raises:
        UserError: an unknown recipe or profile, a word that is no override, a value of the wrong type, or a number that
            no run can have.
    """
    if isinstance(asked, Resolved):
        return asked
    return _checked(_resolved(asked, registry.resolve(asked.recipe), overrides.parse(asked.overrides)))


def with_tokens(resolved: Resolved, tokens: int) -> Resolved:
    """The same run, `tokens` long.

    Raises:
        UserError: an override says how long it is, or a number that no run can have.
    """
    return _checked(resolved.with_spec(tokens=tokens))


def _checked(resolved: Resolved) -> Resolved:
    known_paths.check(resolved.recipe, resolved.overrides)
    limits.check(resolved.plan, resolved.recipe.plan)
    return resolved


def _with_tokens_per_step(plan: Plan, tokens: int | None) -> Plan:
    """The plan with the global batch nearest to `tokens` tokens that is made of whole micro batches of all replicas."""
    if tokens is None:
        return plan
    at_once = max(1, plan.micro_batch_size) * max(1, plan.data_parallel)
    samples = max(1, round(tokens / max(1, plan.seq_length) / at_once)) * at_once
    return dataclasses.replace(plan, global_batch_size=samples)


def _check_lengths(spec: RunSpec, given: tuple[Override, ...]) -> None:
    """One way of saying a number at a time."""
    for option, value, path in (
        ("--tokens", spec.tokens, "trainer.max_steps"),
        ("--tokens-per-step", spec.tokens_per_step, "data.global_batch_size"),
    ):
        words = [str(override) for override in given if override.path == path]
        if value is not None and words:
            raise UserError(
                f"{option} and {path} both say how much is trained",
                expected="one of them",
                found=f"{option} {value} and {words[-1]}",
                do=f"leave {words[-1]} out, or {option} {value}",
            )


def continue_run(before: Resolved, now: RunSpec | Resolved) -> Resolved:
    """A resumed run: what was recorded at its last start, with what the user asks for now.

    Raises:
        UserError: another recipe than the run was started with, or a word that is no override.
    """
    recorded, asked = before.spec, now.spec if isinstance(now, Resolved) else now
    name = asked.name or recorded.name
    if asked.recipe != recorded.recipe:
        raise UserError(
            f"run {name} was started with another recipe",
            expected=f"--recipe {recorded.recipe}",
            found=f"--recipe {asked.recipe}",
            do=launch_command("resume", str(name)),
        )
    new = now.overrides if isinstance(now, Resolved) else overrides.parse(asked.overrides)
    replaced = {override.path for override in new if override.operator == "="}
    given = (*(old for old in before.overrides if old.path not in replaced), *new)
    same_machine = recorded.executor in ("direct", "local")  # chosen by the number of ranks, which may be another now
    spec = dataclasses.replace(
        asked,
        executor=asked.executor or (None if same_machine else recorded.executor),
        cluster=asked.cluster or recorded.cluster,
        env=asked.env or recorded.env,
        memory_profile=asked.memory_profile or recorded.memory_profile,
        gates=asked.gates and recorded.gates,
        retries=asked.retries or recorded.retries,
        retry_wait=asked.retry_wait if asked.retries else recorded.retry_wait,
        profile=asked.profile or recorded.profile,
        change_blend=asked.change_blend or (recorded.change_blend and not replaced & set(_BLEND)),
        tokens=None if "trainer.max_steps" in replaced else asked.tokens or recorded.tokens,
        tokens_per_step=asked.tokens_per_step or recorded.tokens_per_step,
        overrides=tuple(map(str, given)),
    )
    return _checked(_resolved(spec, before.recipe, given))


def changes(before: Plan, now: Plan) -> list[str]:
    """One line per number of the plan that differs: `path: old -> new`."""
    new = now.values()
    return [f"{path}: {old!r} -> {new[path]!r}" for path, old in before.values().items() if old != new[path]]


def _resolved(spec: RunSpec, recipe: Recipe, given: tuple[Override, ...]) -> Resolved:
    plan = recipe.plan.changed(profile=spec.profile) if spec.profile is not None else recipe.plan
    if spec.memory_profile is not None:
        plan = dataclasses.replace(plan, memory_profile=spec.memory_profile)
    if spec.process_group_backend is not None and plan.accelerator == "gpu":
        plan = dataclasses.replace(plan, process_group_backend=spec.process_group_backend)
    declared = plan
    plan = _with_tokens_per_step(overrides.apply_to_plan(plan, given), spec.tokens_per_step)
    if spec.tokens is not None:
        steps = math.ceil(spec.tokens / max(1, plan.tokens_per_step))
        plan = overrides.apply_to_plan(declared.changed(max_steps=steps), given)
        plan = _with_tokens_per_step(plan, spec.tokens_per_step)
    _check_lengths(spec, given)
    optimizer = "optim.config.use_distributed_optimizer"
    on_gloo = plan.process_group_backend == "gloo" and plan.accelerator == "gpu"
    if on_gloo and not any(override.path == optimizer for override in given):
        plan = dataclasses.replace(plan, distributed_optimizer=False)  # recipes/build/collectives.py says why
    return Resolved(spec, recipe, given, plan)
