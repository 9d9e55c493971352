"""Learning-rate schedules: pure functions of the step and of their own parameters.

No schedule reads `trainer.max_steps`: extending or cutting a run does not change what was, or would have
been, done. All steps are optimizer steps (global batches), counted from 0: `lr(s)` is the learning rate that
optimizer step s is made with. A warm-up of W steps rises as (s+1)/(W+1), so that step 0 already moves the
weights and step W is the first at `max_lr` (NeMo's own convention). Standard library only; `recipes/build/lr_slot.py`
applies a schedule to an optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from common.errors import UserError, unknown_name

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Phase:
    """A stretch of a schedule: steps first <= s < end; `end` is None when it never ends."""

    name: str
    first: int
    end: int | None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What all schedules share: linear warm-up from `start_lr` over `warmup_steps` to `max_lr`.

    Raises:
        UserError: a parameter out of range, at construction.
    """

    kind: ClassVar[str]
    max_lr: float
    warmup_steps: int = 0
    start_lr: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_lr"):
                ok = isinstance(value, (int, float)) and math.isfinite(value) and 0 <= value <= self.max_lr
                expected = f"a learning rate in 0..max_lr ({self.max_lr!r})"
                tenth = self.max_lr / 10 if isinstance(self.max_lr, (int, float)) else 1e-5
                self._need(ok and self.max_lr > 0, field.name, expected, **{field.name: tenth})
            elif field.name in ("decay_steps", "cooldown_steps", "warmup_steps", "fork_step", "decay_end"):
                least = {"decay_steps": 1, "cooldown_steps": 1, "warmup_steps": 0}.get(field.name, self._warm_end)
                whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
                optional = value is None and field.default is None
                late = isinstance(value, int) and least > value > 0  # a longer warm-up than the schedule has room for
                good = {"warmup_steps": value // 10} if late else {field.name: least}
                self._need(whole or optional, field.name, f"a whole number of steps, at least {least}", **good)

    @property
    def _warm_end(self) -> int:
        """The first step at which the part after the warm-up may end or fork."""
        return self.warmup_steps

    def _need(self, ok: bool, name: str, expected: str, **good: Any) -> None:
        """Refuse the parameter `name` unless `ok`; `good` are parameters that solve it."""
        if not ok:
            words = " ".join(f"optim.lr_scheduler.{key}={value}" for key, value in good.items())
            raise UserError(
                f"schedule {self.kind}: {name} is out of range",
                expected=expected,
                found=f"{name}={getattr(self, name)!r}",
                do=f"{words} (docs/schedules.md lists the parameters)",
            )

    def lr(self, step: int) -> float:
        """Learning rate of optimizer step `step` (0 is the first)."""
        if step < 0:
            raise ValueError(f"step {step} is before the first")
        if step < self.warmup_steps:
            return self.start_lr + (self.max_lr - self.start_lr) * ((step + 1) / (self.warmup_steps + 1))
        return self._after_warmup(step)

    def _after_warmup(self, step: int) -> float:
        raise NotImplementedError

    def phases(self) -> list[Phase]:
        """The stretches of the curve, in order, empty ones left out; the last one never ends."""
        borders = [("warm-up", 0), *self._borders()]
        ends: list[int | None] = [*(first for _, first in borders[1:]), None]
        found = [Phase(name, first, end) for (name, first), end in zip(borders, ends, strict=True)]
        return [phase for phase in found if phase.end is None or phase.end > phase.first]

    def _borders(self) -> list[tuple[str, int]]:
        """Name and first step of each phase after the warm-up."""
        raise NotImplementedError

    @property
    def end(self) -> int | None:
        """First step at which the curve is flat for good at its minimum; None when it never gets there."""
        last = self.phases()[-1]
        return last.first if last.name == "flat" else None

    def warnings(self, max_steps: int) -> list[str]:
        """What is odd about a run of `max_steps` steps with this schedule; one line each."""
        found = []
        if self.warmup_steps >= max_steps:
            found.append(f"warm-up of {self.warmup_steps} steps is not over at the end of the run ({max_steps} steps)")
        elif self.end is not None and self.end > max_steps:
            last = self.lr(max_steps - 1)
            found.append(f"the run ends at step {max_steps}, its decay at step {self.end}: the last lr is {last:.3g}")
        elif self.end is not None and max_steps - self.end > max(1, max_steps // 10):
            found.append(f"steps {self.end} to {max_steps} stay flat at the minimum lr {self.lr(self.end):.3g}")
        return found


def _cosine(high: float, low: float, step: int, length: int) -> float:
    """Half a cosine: `high` at step 0, `low` at step `length`; NeMo's order of operations, so equal to the bit."""
    return (high - low) * (0.5 * (1.0 + math.cos(math.pi * step / length))) + low


@dataclass(frozen=True, kw_only=True)
class RewarmCosine(Schedule):
    """Re-warm, then re-decay: cosine from `max_lr` to `min_lr` at step `decay_end`, then flat.

    Source: Ibrahim et al. 2024, arXiv 2403.08763.
    """

    kind: ClassVar[str] = "rewarm_cosine"
    min_lr: float
    decay_end: int

    @property
    def _warm_end(self) -> int:
        return self.warmup_steps + 1

    def _after_warmup(self, step: int) -> float:
        length = self.decay_end - self.warmup_steps
        return (
            self.min_lr
            if step >= self.decay_end
            else _cosine(self.max_lr, self.min_lr, step - self.warmup_steps, length)
        )

    def _borders(self) -> list[tuple[str, int]]:
        return [("decay", self.warmup_steps), ("flat", self.decay_end)]


@dataclass(frozen=True, kw_only=True)
class Polish(Schedule):
    """No warm-up: cosine from `max_lr` at step 0 to `min_lr` (max_lr/100 unless given) at `decay_end`, then flat.

    Source: Parmar et al. 2024, arXiv 2407.07263 (start at the pretraining's minimum, decay to 1/100).
    """

    kind: ClassVar[str] = "polish"
    decay_end: int
    min_lr: float | None = None

    def __post_init__(self) -> None:
        if self.min_lr is None:
            object.__setattr__(self, "min_lr", self.max_lr / 100)
        super().__post_init__()
        self._need(
            self.warmup_steps == 0, "warmup_steps", "0: polish has no warm-up (rewarm_cosine has one)", warmup_steps=0
        )
        self._need(self.start_lr == 0, "start_lr", "0: polish has no warm-up (rewarm_cosine has one)", start_lr=0)
        self._need(self.decay_end > 0, "decay_end", "at least 1 step", decay_end=1000)

    def _after_warmup(self, step: int) -> float:
        low = self.max_lr / 100 if self.min_lr is None else self.min_lr
        return low if step >= self.decay_end else _cosine(self.max_lr, low, step, self.decay_end)

    def _borders(self) -> list[tuple[str, int]]:
        return [("decay", 0), ("flat", self.decay_end)]


@dataclass(frozen=True, kw_only=True)
class Forked(Schedule):
    """A schedule with a plateau that lasts until `fork_step`, and then a decay of `decay_steps` to `min_lr`.

    Without a fork the plateau never ends. Any checkpoint on it can be resumed with `fork_step` = its
    step: the past stays as it was, the annealing starts there.
    """

    min_lr: float = 0.0
    fork_step: int | None = None
    decay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        together = (self.fork_step is None) == (self.decay_steps is None)
        good = None if self.fork_step is None else max(1, self.fork_step // 6)
        self._need(together, "decay_steps", "set together with fork_step", decay_steps=good)

    def fork(self, at_step: int, decay_steps: int) -> Self:
        """The same schedule, annealing from `at_step` on."""
        return dataclasses.replace(self, fork_step=at_step, decay_steps=decay_steps)

    def _decayed(self, step: int) -> float:
        """Share of the decay that is done at `step`, in 0..1."""
        if self.fork_step is None or self.decay_steps is None:
            return 0.0
        return min(1.0, max(0.0, (step - self.fork_step) / self.decay_steps))

    def _fork_borders(self) -> list[tuple[str, int]]:
        if self.fork_step is None or self.decay_steps is None:
            return []
        return [("decay", self.fork_step), ("flat", self.fork_step + self.decay_steps)]


@dataclass(frozen=True, kw_only=True)
class WSD(Forked):
    """Warm-up, stable at `max_lr`, then decay, linear or as 1-sqrt of the share done.

    Sources: Hu et al. 2024 (MiniCPM), arXiv 2404.06395; decay_shape "1-sqrt": Haegele et al. 2024, arXiv 2405.18392.
    """

    kind: ClassVar[str] = "wsd"
    decay_shape: str = "1-sqrt"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._need(
            self.decay_shape in ("linear", "1-sqrt"), "decay_shape", '"linear" or "1-sqrt"', decay_shape="linear"
        )

    def _after_warmup(self, step: int) -> float:
        done = self._decayed(step) if self.decay_shape == "linear" else math.sqrt(self._decayed(step))
        return self.max_lr * (1.0 - done) + self.min_lr * done

    def _borders(self) -> list[tuple[str, int]]:
        return [("stable", self.warmup_steps), *self._fork_borders()]


@dataclass(frozen=True, kw_only=True)
class Infinite(Forked):
    """Warm-up, cosine cooldown over `cooldown_steps` to `constant_lr`, constant, exponential annealing to `min_lr`.

    While it is constant, the next corpus can follow at the same lr, without another re-warm.

    Source: Ibrahim et al. 2024, arXiv 2403.08763, section on infinite learning-rate schedules.
    """

    kind: ClassVar[str] = "infinite"
    constant_lr: float
    cooldown_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"above 0, up to constant_lr ({self.constant_lr!r})"
        self._need(0 < self.min_lr <= self.constant_lr, "min_lr", expected, min_lr=self.constant_lr / 10)

    @property
    def _warm_end(self) -> int:
        return self.warmup_steps + self.cooldown_steps

    def _after_warmup(self, step: int) -> float:
        since = step - self.warmup_steps
        if since < self.cooldown_steps:
            return _cosine(self.max_lr, self.constant_lr, since, self.cooldown_steps)
        return float(self.constant_lr * (self.min_lr / self.constant_lr) ** self._decayed(step))

    def _borders(self) -> list[tuple[str, int]]:
        return [("cooldown", self.warmup_steps), ("constant", self._warm_end), *self._fork_borders()]


def _advise(wrong: list[str], missing: list[str], max_lr: float) -> str:
    """Overrides after which the parameters are those of the kind: none that it does not have, none missing."""
    usual = {"min_lr": f"{max_lr / 10:g}", "constant_lr": f"{max_lr / 3:.2g}", "decay_end": "1000"}
    words = [f"{name}={'0' if name == 'warmup_steps' else 'None'}" for name in wrong]
    words += [f"{name}={usual.get(name, '100')}" for name in missing]
    return " ".join(f"optim.lr_scheduler.{word}" for word in words) + " (or other values; docs/schedules.md)"


KINDS: dict[str, type[Schedule]] = {kind.kind: kind for kind in (RewarmCosine, Polish, WSD, Infinite)}


def build(kind: str, **parameters: Any) -> Schedule:
    """The schedule of that kind; a parameter that is None counts as not given.

    Raises:
        UserError: unknown kind, a parameter that this kind does not have, one that is missing or out of range.
    """
    if kind not in KINDS:
        path = "optim.lr_scheduler.kind="
        raise unknown_name("schedule", kind, KINDS, f"{path}rewarm_cosine", typed=path + "{}")
    fields = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    given = {name: value for name, value in parameters.items() if value is not None}
    wrong = sorted(given.keys() - fields.keys())
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in given]
    if wrong or missing:
        raise UserError(
            f"schedule {kind}: " + ("a parameter of another kind" if wrong else "a parameter is missing"),
            expected="among " + ", ".join(fields) if wrong else "a value for " + ", ".join(missing),
            found=", ".join(f"{name}={given[name]!r}" for name in (wrong or sorted(given))) or "none",
            do=_advise(wrong, missing, given.get("max_lr", 1e-4)),
        )
    return KINDS[kind](**given)
