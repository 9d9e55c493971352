"""Stages of a blend: what a user writes, and the step at which each of them ends.

The learning rate is a function of the step, so every boundary is known before training starts. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from common.errors import UserError
from common.quantities import parse_count

FORMS = "tokens (500M), a share of the run (80%), decay_start, or lr <= peak/5"
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_FALLEN = re.compile(r"lr\s*<=\s*peak\s*/\s*(\d+(?:\.\d+)?)")


class Stage(BaseModel):
    """A part of a run with shares of its own.

    Args:
        name: shown in tables and in the report; default: stage-1, stage-2 and so on.
        until: where it ends, counted from the start of the run: tokens (500M), a share of the run (80%), or an event of
            the learning rate: `decay_start`, or `lr <= peak/5`. Every stage but the last one has it.
        weights: domain -> weight within its role. Of a role that is named here, only the named domains are read; of
            the other role all domains, by the blend's own weights.
        replay_share: replaces that of the blend.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    until: int | float | str | None = None
    weights: dict[str, float] = Field(default_factory=dict)
    replay_share: float | None = Field(default=None, ge=0, le=1)

    @field_validator("until", mode="before")
    @classmethod
    def _no_truth_value(cls, until: object) -> object:
        if isinstance(until, bool):
            raise ValueError(f"it must be {FORMS}")
        return until

    @field_validator("weights")
    @classmethod
    def _positive(cls, weights: dict[str, float]) -> dict[str, float]:
        if any(weight <= 0 for weight in weights.values()):
            raise ValueError("a weight must be above 0; a domain that is not named is not read")
        return weights


class Phase(Protocol):
    """A stretch of a learning-rate schedule."""

    @property
    def name(self) -> str: ...
    @property
    def first(self) -> int: ...


class LearningRate(Protocol):
    """What a boundary needs to know of a schedule (recipes/schedules.py): after the warm-up it never rises."""

    @property
    def max_lr(self) -> float: ...
    @property
    def warmup_steps(self) -> int: ...
    def lr(self, step: int) -> float: ...
    def phases(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class RunLength:
    """The numbers of a run that decide where its stages end.

    Args:
        max_steps: optimizer steps.
        global_batch_size: samples per step.
        seq_length: tokens per sample.
        schedule: the learning rate by step.
    """

    max_steps: int
    global_batch_size: int
    seq_length: int
    schedule: LearningRate

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length


def stage_names(stages: Sequence[Stage]) -> list[str]:
    """The name of each stage, given or counted."""
    return [stage.name or f"stage-{number}" for number, stage in enumerate(stages, start=1)]


def check_stages(stages: Sequence[Stage]) -> None:
    """Check what can be checked of the stages without a run: names, and where an `until` must stand.

    Raises:
        UserError: two stages of one name, a stage in the middle without `until`, or a last stage with it.
    """
    names = stage_names(stages)
    for name, stage in zip(names[:-1], stages, strict=False):
        if stage.until is None:
            raise UserError(
                f"stage {name} has no end",
                expected=f"until: {FORMS}",
                found="no until, and another stage after it",
                do=f"{{name: {name}, until: 80%}}",
            )
    if stages and stages[-1].until is not None:
        raise UserError(
            f"the last stage, {names[-1]}, has an end",
            expected="no until: it lasts to the end of the run",
            found=f"until: {stages[-1].until}",
            do="remove its until, or add a stage after it",
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            "two stages have the same name",
            expected="a different name for each stage",
            found=", ".join(twice),
            do="rename one of them",
        )


def resolve_boundaries(stages: Sequence[Stage], run: RunLength) -> list[tuple[int, int]]:
    """First step and end (the first step after it) of each stage.

    Raises:
        UserError: an `until` that cannot be read, is never reached, or does not come after the one before.
    """
    names, ends = stage_names(stages), [0]
    for name, stage in zip(names[:-1], stages, strict=False):
        end = resolve_until(name, stage.until, run)
        if not ends[-1] < end < run.max_steps:
            before = f"after step {ends[-1]}" if len(ends) > 1 else "after step 0"
            raise UserError(
                f"stage {name} has no step of its own" if end <= ends[-1] else f"stage {name} never ends",
                expected=f"an end {before} and before step {run.max_steps}, where the run ends",
                found=f"until: {stage.until} is step {end}",
                do="another until, or another length of the run (--tokens, trainer.max_steps)",
            )
        ends.append(end)
    ends.append(run.max_steps)
    return list(zip(ends[:-1], ends[1:], strict=True))


def resolve_until(name: str, until: int | float | str | None, run: RunLength) -> int:
    """The first step that is not in stage `name` any more.

    Tokens are rounded up to whole steps, shares to the nearest one.

    Raises:
        UserError: it cannot be read, or the learning rate of the run has no such event.
    """
    text = str(until).strip()
    if text == "decay_start":
        return _decay_start(name, run)
    if match := _FALLEN.fullmatch(text):
        return _fallen_to(name, float(match[1]), run)
    if match := _SHARE.fullmatch(text):
        return round(float(match[1]) / 100 * run.max_steps)
    try:
        return math.ceil(parse_count(text, "until") / run.tokens_per_step)
    except UserError:
        raise UserError(
            f"stage {name}: cannot read its until", expected=FORMS, found=repr(until), do="until: 80%"
        ) from None


def _decay_start(name: str, run: RunLength) -> int:
    found = next((phase.first for phase in run.schedule.phases() if phase.name == "decay"), None)
    if found is None:
        raise UserError(
            f"stage {name} ends when the decay starts, and this learning rate never decays",
            expected="a schedule with a decay within the run",
            found="no decay (docs/schedules.md)",
            do="optim.lr_scheduler.fork_step=N optim.lr_scheduler.decay_steps=M, or until: 80%",
        )
    return int(found)


def _fallen_to(name: str, divisor: float, run: RunLength) -> int:
    """The first step after the warm-up at which the learning rate is at most peak / divisor."""
    schedule = run.schedule
    limit = schedule.max_lr / divisor if divisor > 0 else math.nan
    first, last = min(schedule.warmup_steps, run.max_steps), run.max_steps
    while first < last:  # a bisection: the learning rate does not rise after the warm-up
        middle = (first + last) // 2
        if schedule.lr(middle) <= limit:
            last = middle
        else:
            first = middle + 1
    if first >= run.max_steps:
        end = schedule.lr(run.max_steps - 1)
        raise UserError(
            f"stage {name} ends at lr <= peak/{divisor:g}, which this run never reaches",
            expected=f"a learning rate that falls to {limit:.3g}",
            found=f"{end:.3g} at the last step, peak/{schedule.max_lr / end:.3g}" if end else "another course",
            do="a smaller number after peak/, a schedule that falls further, or until: 80%",
        )
    return first
