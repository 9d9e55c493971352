"""Which short trainings a pilot makes: learning rate x replay share at two lengths, the whole schedule in each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.errors import UserError
from common.spec import RunSpec
from data.resolve_blend import load_run_blend
from planning.pilot_request import PilotRequest
from recipes.plan import SCHEDULE, Plan
from recipes.resolve import Resolved, resolve

LEAST_STEPS = 10  # of the shorter trainings: fewer hold hardly a warm-up and a decay
LENGTHS = (1, 2)  # of the trainings of one point, in units of the shorter: what a longer one adds is continued
RATES, RATES_WITHOUT_REPLAY = (0.33, 1.0, 3.0), (0.2, 0.5, 1.5, 4.0)
MOST_REPLAY = 0.9
MOST_CONTINUED = 10  # run / longest training: further on no numbers were compared (docs/measurements/pilot.md)
_STEPS = ("warmup_steps", "decay_end", "fork_step", "decay_steps", "cooldown_steps")
_RATES = ("min_lr", "constant_lr", "start_lr", "schedule_max_lr")
_PATHS = {name: f"optim.lr_scheduler.{leaf}" for name, leaf in SCHEDULE.items()}


@dataclass(frozen=True)
class Training:
    """One short training: its name, peak learning rate, replay share (None without replay) and length."""

    name: str
    rate: float
    share: float | None
    steps: int


@dataclass(frozen=True)
class Design:
    """What a pilot trains.

    Args:
        resolved: the run that it is for.
        steps: of each of the longer trainings; the others have half of it.
        share: replay share of that run; None where it is not varied.
        trainings: in the order in which they are made.
        left_out: what a larger budget would try too.
        numbers_from: the least budget, in percent, whose longest training is long enough for numbers; None: there is
            none.
    """

    resolved: Resolved
    steps: int
    share: float | None
    trainings: tuple[Training, ...]
    left_out: str = ""
    numbers_from: int | None = None

    @property
    def plan(self) -> Plan:
        return self.resolved.plan

    @property
    def gives_numbers(self) -> bool:
        """Whether the changes after the whole run are continued no further than was compared with runs."""
        return self.plan.max_steps <= MOST_CONTINUED * self.steps

    @property
    def budget(self) -> float:
        """What the trainings really take, as a share of the run's steps."""
        return sum(one.steps for one in self.trainings) / self.plan.max_steps

    def overrides(self, one: Training) -> tuple[str, ...]:
        """What makes the run this training: its length, schedule, learning rate, share and intervals."""
        plan, steps = self.plan, one.steps
        words = [f"trainer.max_steps={steps}", *rate_overrides(plan, one.rate)]
        for name in _STEPS:
            if value := getattr(plan, name):
                scaled = round(value * steps / plan.max_steps)
                words.append(f"{_PATHS[name]}={max(scaled, 0 if name == 'warmup_steps' else 1)}")
        if one.share is not None:
            words.append(f"data.replay_share={one.share:g}")
        words += [f"trainer.val_check_interval={steps}", f"log.ckpt.every_n_train_steps={steps}"]
        return (*words, "log.ckpt.keep_last=1", "log.ckpt.keep_best=None", "trainer.log_every_n_steps=1")


def rate_overrides(plan: Plan, rate: float) -> tuple[str, ...]:
    """The overrides that set the peak learning rate, with the other rates of the schedule in proportion."""
    words = [f"optim.config.lr={rate:.3g}"]
    for name in _RATES:
        if value := getattr(plan, name):
            words.append(f"{_PATHS[name]}={value * rate / plan.max_lr:.3g}")
    return tuple(words)


def make_design(request: PilotRequest) -> Design:
    """Lay out the trainings of a pilot: the largest of `_sizes` that the budget holds.

    Raises:
        UserError: the budget is too small (with the smallest that works), or the factors and shares cannot be used.
    """
    resolved = resolve(request.spec())
    plan = resolved.plan
    share = _replay_share(plan)
    factors = request.numbers("rates") or (RATES if share is not None else RATES_WITHOUT_REPLAY)
    if len(factors) < 3:
        raise UserError(
            "too few learning rates for a pilot",
            expected="at least 3: the law is quadratic in the logarithm of the learning rate",
            found=f"--rates {request.rates}",
            do="--rates 0.33,1,3",
        )
    sizes = list(_sizes(request, factors, _shares(request, share)))
    size = _largest(sizes, request.budget_share, plan)
    if size is None:
        raise _too_small(request, plan, sizes[-1].points)
    unit = _shorter_steps(request.budget_share, plan, size.points)
    points = [(float(f"{plan.max_lr * f:.3g}"), one) for f, one in itertools.product(size.factors, size.shares)]
    trainings = tuple(_training(rate, one, length * unit) for length in LENGTHS for rate, one in points)
    varied = share if size.shares != (None,) else None
    return Design(resolved, LENGTHS[-1] * unit, varied, trainings, size.left_out, _numbers_from(sizes, plan))


@dataclass(frozen=True)
class _Size:
    """The points of a design: factors of the learning rate, replay shares, and what a larger one has beside them."""

    factors: tuple[float, ...]
    shares: tuple[float | None, ...]
    left_out: str = ""

    @property
    def points(self) -> int:
        return len(self.factors) * len(self.shares)


def _sizes(request: PilotRequest, factors: tuple[float, ...], shares: tuple[float | None, ...]) -> Iterator[_Size]:
    """The designs from the largest to the smallest: what the user names stays, and every point has both lengths.

    With one length nothing says where the best learning rate goes in a longer run (docs/measurements/pilot.md).
    """
    yield _Size(factors, shares)
    if request.shares is None and len(shares) > 1:
        yield _Size(factors, (None,), "other replay shares than the recipe's")
    elif request.rates is None and len(factors) > len(RATES):
        yield _Size(RATES, shares, "a fourth learning rate")


def _shorter_steps(budget_share: float, plan: Plan, points: int) -> int:
    """Steps of each of the shorter trainings, in the budget."""
    return int(budget_share * plan.max_steps / (points * sum(LENGTHS)) + 1e-9)


def _largest(sizes: Sequence[_Size], budget_share: float, plan: Plan) -> _Size | None:
    """The largest design that a budget holds; None if it holds none."""
    return next((one for one in sizes if _shorter_steps(budget_share, plan, one.points) >= LEAST_STEPS), None)


def _numbers_from(sizes: Sequence[_Size], plan: Plan) -> int | None:
    """The least budget in percent whose design gives numbers; a larger budget may choose a design of more points."""
    for percent in range(1, 101):
        size = _largest(sizes, percent / 100, plan)
        if size is not None:
            longest = LENGTHS[-1] * _shorter_steps(percent / 100, plan, size.points)
            if plan.max_steps <= MOST_CONTINUED * longest:
                return percent
    return None


def _too_small(request: PilotRequest, plan: Plan, points: int) -> UserError:
    need = LEAST_STEPS * points * sum(LENGTHS)
    least = -(-need * 100 // plan.max_steps)
    return UserError(
        f"a budget of {request.budget} is too small for this pilot",
        expected=f"{points} points, each trained for at least {LEAST_STEPS} and {2 * LEAST_STEPS} steps:"
        f" {need} of the run's {plan.max_steps} steps",
        found=f"{int(request.budget_share * plan.max_steps)} steps",
        do=f"--budget {least}%" if least <= 100 else "the run is too short for a pilot: train it with each setting",
    )


def _training(rate: float, share: float | None, steps: int) -> Training:
    return Training(f"lr-{rate:g}" + ("" if share is None else f"-replay-{share:g}") + f"-{steps}", rate, share, steps)


def _replay_share(plan: Plan) -> float | None:
    """The share that can be varied: of a blend with a replay domain, without stages, which have shares of their own.

    A forgetting budget moves the share by itself, so that only the learning rate is left to try.
    """
    if plan.blend is None or plan.forgetting_budget is not None:
        return None
    blend = load_run_blend(plan.blend)
    if blend.stages or not any(domain.role == "replay" for domain in blend.domains):
        return None
    return blend.replay_share if plan.replay_share is None else plan.replay_share


def _shares(request: PilotRequest, share: float | None) -> tuple[float | None, ...]:
    asked = request.numbers("shares")
    if share is None:
        if asked is not None:
            raise UserError(
                "--shares needs replay",
                expected="a blend with a domain of the role replay, without stages and forgetting budget",
                found="no such blend",
                do="leave --shares out",
            )
        return (None,)
    if asked is not None:
        if len(asked) < 2 or asked[0] == 0:
            raise UserError(
                "too few replay shares for a pilot",
                expected="at least 2, above 0: the law has the logarithm of the share",
                found=f"--shares {request.shares}",
                do="--shares 0.1,0.3",
            )
        return asked
    middle = share or 0.1
    return (middle / 2, min(MOST_REPLAY, 2 * middle))


def training_spec(design: Design, one: Training, runs: str) -> RunSpec:
    """What the launcher is asked for to make a training."""
    spec = design.resolved.spec
    return dataclasses.replace(
        spec, name=one.name, runs=runs, tokens=None, overrides=(*spec.overrides, *design.overrides(one))
    )
