"""A law of the validation loss along a run and its learning rate, its fit, and how far off its forecasts are.

    loss(s) = level + A (1 + S1/w)^-a - C S2

S1(s) is the sum of the learning rates before step s in units of a peak: the power law of the training. S2(s) is the
annealing: every fall of the learning rate, counted with a momentum because a lower rate needs some steps to lower the
loss. Both are those of Tissue et al. 2024, arXiv 2408.11029. With a level of its own and an A of either sign the curve
also describes a domain that is being forgotten, as in the law for continual pretraining of Wang et al. 2025,
arXiv 2505.07796, whose part before the run is not known here.

The shape (a, w, momentum) is one of a fixed set of candidates. Which one, A and C follow from earlier runs of the same
kind where there are any (`fit_earlier`), else from the first part itself (`fit_alone`). The level is always the run's
own. Standard library and numpy, scipy where a robust fit needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[numpy.float64]
    Ints = NDArray[numpy.int64]

LEVEL_PART = 0.6  # of the first part: its last points, of which the level is the mean difference to the law
SKIPPED_PART = 0.05  # of the run, beside the warm-up: its first steps, which follow no such law
EXPONENTS = (0.1, 0.25, 0.5, 1.0, 2.0)
WIDTHS = (0.03, 0.1, 0.3, 1.0)  # of the longest run, in steps at the peak
MEMORIES = (0.0, 0.03, 0.1, 0.3, 1.0)  # of the longest run, in steps
ALONE_MEMORY = 0.1
# what a whole annealing brings, as a share of the change since step 0, for a run without earlier runs: measured on
# qwen25_tiny (docs/measurements/forecast.md); as uncertain as it is large
ALONE_ANNEALING = 0.15
FIT_PART = 0.6  # of the points of the first part: fitted to compare the shapes by their error on the others


@dataclass(frozen=True)
class Shape:
    """One candidate: exponent a, width w (steps at the peak) and memory of the momentum (steps, 0 for none)."""

    exponent: float
    width: float
    memory: float


@dataclass(frozen=True)
class Curve:
    """The validation losses of one domain of one run.

    Args:
        rates: float[num_steps], learning rate of every step of the whole run, the future ones too.
        warmup_steps: at its start.
        steps: int[n], steps at which it was validated, ascending.
        losses: float[n], nats per token.
    """

    rates: Floats
    warmup_steps: int
    steps: Ints
    losses: Floats

    @property
    def num_steps(self) -> int:
        return len(self.rates)

    @property
    def first_step(self) -> int:
        """The first step that the law is to describe."""
        return max(self.warmup_steps, round(SKIPPED_PART * self.num_steps))

    def between(self, after: float, until: float) -> Curve:
        """The validations after one step until another, both of them steps of this run."""
        kept = (self.steps > after) & (self.steps <= until)
        return Curve(self.rates, self.warmup_steps, self.steps[kept], self.losses[kept])

    def level_points(self, cut: float) -> Curve:
        """The validations until `cut` that the level is taken from."""
        return self.between(max(self.first_step - 1, (1 - LEVEL_PART) * cut), cut)


@dataclass(frozen=True)
class Fit:
    """A law without its level.

    Args:
        shape: the candidate that was selected.
        slope: A.
        annealing: C.
        peak: learning rate in units of which S1 and S2 are counted.
    """

    shape: Shape
    slope: float
    annealing: float
    peak: float

    def changes(self, rates: Floats, steps: Ints) -> Floats:
        """The law without its level at some steps: float[n]."""
        power, annealing = Areas(rates, self.peak).features(steps, self.shape).T
        found: Floats = self.slope * power + self.annealing * annealing
        return found

    def level(self, points: Curve) -> float:
        """Mean difference between a run's validations and the law."""
        return float(numpy.mean(points.losses - self.changes(points.rates, points.steps)))


class Areas:
    """S1 and S2 of a run at every step.

    Args:
        rates: float[num_steps], learning rate of every step.
        peak: learning rate in units of which they are counted.
    """

    def __init__(self, rates: Floats, peak: float) -> None:
        self._area = numpy.concatenate([[0.0], numpy.cumsum(rates / peak)])
        self._falls = numpy.maximum(0.0, -numpy.diff(rates, prepend=rates[:1])) / peak
        self._annealing: dict[float, Floats] = {}

    def features(self, steps: Ints, shape: Shape) -> Floats:
        """What A and C multiply: float[n, 2], (1 + S1/w)^-a and -S2."""
        if shape.memory not in self._annealing:
            self._annealing[shape.memory] = numpy.concatenate([[0.0], numpy.cumsum(_spread(self._falls, shape.memory))])
        power = (1 + self._area[steps] / shape.width) ** -shape.exponent
        return numpy.stack([power, -self._annealing[shape.memory][steps]], axis=1)


def _spread(falls: Floats, memory: float) -> Floats:
    """Each fall spread over the steps after it, by a factor of exp(-1/memory) per step."""
    if memory <= 0:
        return falls
    keep, now, spread = float(numpy.exp(-1 / memory)), 0.0, []
    for fall in falls.tolist():
        now = keep * now + (1 - keep) * fall
        spread.append(now)
    return numpy.array(spread)


def candidates(num_steps: int, memories: Sequence[float] = MEMORIES) -> list[Shape]:
    """Every shape that is compared, for runs of up to `num_steps` steps."""
    return [
        Shape(exponent, width * num_steps, memory * num_steps)
        for exponent, width, memory in itertools.product(EXPONENTS, WIDTHS, memories)
    ]


@dataclass(frozen=True)
class EarlierFit:
    """A law from earlier runs, and what it would have made of each of them.

    Args:
        fit: from all of them.
        errors: float[num_runs, num_fractions], forecast minus outcome of each run in nats per token, forecast from the
            same part of it with a law of the others alone.
        fractions: float[num_fractions], the places in the run that `errors` is for; the last one is 1.
    """

    fit: Fit
    errors: Floats
    fractions: Floats


def fit_earlier(curves: Sequence[Curve], part: float) -> EarlierFit:
    """Fit A and C to whole earlier runs, each with its own level; take the shape that forecasts their ends best.

    Args:
        curves: at least two, each validated in the part that a level is taken from and at its end.
        part: of each run that counts as its first, in 0..1.
    """
    peak = max(float(curve.rates.max()) for curve in curves)
    areas = [Areas(curve.rates, peak) for curve in curves]
    best: tuple[float, Shape, list[_Sums]] | None = None
    for shape in candidates(max(curve.num_steps for curve in curves)):
        sums = [_sum(curve, part, shape, own) for curve, own in zip(curves, areas, strict=True)]
        missed = 0.0
        for i, one in enumerate(sums):
            slope, annealing = _solve([*sums[:i], *sums[i + 1 :]])
            missed += (slope * one.last[0] + annealing * one.last[1] - one.last_loss) ** 2
        if best is None or missed < best[0]:
            best = missed, shape, sums
    assert best is not None
    _, shape, sums = best
    slope, annealing = _solve(sums)
    fractions = numpy.linspace(part, 1.0, 31)
    errors = []
    for i, curve in enumerate(curves):
        own = Fit(shape, *_solve([*sums[:i], *sums[i + 1 :]]), peak)
        later = curve.between(part * curve.num_steps, curve.num_steps)
        level = own.level(curve.level_points(part * curve.num_steps))
        missed_at = own.changes(curve.rates, later.steps) + level - later.losses
        errors.append(numpy.interp(fractions, later.steps / curve.num_steps, missed_at))
    return EarlierFit(Fit(shape, slope, annealing, peak), numpy.array(errors), fractions)


@dataclass(frozen=True)
class _Sums:
    """The normal equations of one run, relative to the level of its first part."""

    matrix: Floats
    vector: Floats
    last: Floats
    last_loss: float


def _sum(curve: Curve, part: float, shape: Shape, areas: Areas) -> _Sums:
    points, near = curve.between(curve.first_step - 1, curve.num_steps), curve.level_points(part * curve.num_steps)
    middle = areas.features(near.steps, shape).mean(axis=0)
    rows = areas.features(points.steps, shape) - middle
    losses = points.losses - near.losses.mean()
    return _Sums(rows.T @ rows, rows.T @ losses, rows[-1], float(losses[-1]))


def _solve(sums: Sequence[_Sums]) -> tuple[float, float]:
    """Least squares of A and C >= 0: annealing does not raise a loss."""
    matrix = sum(one.matrix for one in sums) + 1e-9 * numpy.eye(2)
    vector = sum((one.vector for one in sums), numpy.zeros(2))
    slope, annealing = numpy.linalg.solve(matrix, vector)
    if annealing < 0:
        slope, annealing = vector[0] / matrix[0, 0], 0.0
    return float(slope), float(annealing)


@dataclass(frozen=True)
class AloneFit:
    """Laws from the first part of one run alone.

    Args:
        fits: one for each candidate shape.
        levels: the level of each.
        weights: of each, by the error on points that it was not fitted to; their sum is 1.
        noise: standard deviation of the points around the best of them, nats per token.
    """

    fits: tuple[Fit, ...]
    levels: Floats
    weights: Floats
    noise: float

    def predict(self, rates: Floats, steps: Ints) -> tuple[Floats, Floats]:
        """Loss and its standard deviation at some steps: float[n] each.

        The deviation has three parts: how far the shapes are apart, what annealing brings (as uncertain as it is
        large), and the noise.
        """
        each = numpy.stack([fit.changes(rates, steps) for fit in self.fits]) + self.levels[:, None]
        mean = self.weights @ each
        apart = self.weights @ (each - mean) ** 2
        one = self.fits[0]
        annealed = Areas(rates, one.peak).features(steps, one.shape)[:, 1] * one.annealing
        return mean, numpy.sqrt(apart + annealed**2 + self.noise**2)


def fit_alone(curve: Curve, cut: int, start: float) -> AloneFit:
    """Fit every candidate to the validations until `cut`, robustly, and weigh them by their error on the later ones.

    Args:
        start: loss at step 0.
    """
    points = curve.between(curve.first_step - 1, cut)
    peak = float(curve.rates.max())
    annealing = ALONE_ANNEALING * abs(start - float(points.losses[-1]))
    fitted = max(2, round(FIT_PART * len(points.steps)))
    areas = Areas(curve.rates, peak)
    fits, levels, missed = [], [], []
    for shape in candidates(curve.num_steps, (ALONE_MEMORY,)):
        rows = areas.features(points.steps, shape)
        losses = points.losses - annealing * rows[:, 1]
        level, slope = _robust_line(rows[:fitted, 0], losses[:fitted])
        ahead = level + slope * rows[fitted:, 0] - losses[fitted:]
        missed.append(float(numpy.mean(ahead**2)))
        level, slope = _robust_line(rows[:, 0], losses)
        fits.append(Fit(shape, slope, annealing, peak))
        levels.append(level)
    errors = numpy.array(missed)
    weights = 1 / (errors + 1e-8) ** 2
    best = int(numpy.argmin(errors))
    left = points.losses - fits[best].changes(curve.rates, points.steps) - levels[best]
    return AloneFit(tuple(fits), numpy.array(levels), weights / weights.sum(), float(numpy.std(left)))


def _robust_line(x: Floats, y: Floats) -> tuple[float, float]:
    """Level and slope of y over x, by least squares that count far points less (soft L1)."""
    from scipy.optimize import least_squares

    rows = numpy.stack([numpy.ones_like(x), x], axis=1)
    start = numpy.linalg.lstsq(rows, y, rcond=None)[0]
    left = y - rows @ start
    size = max(1e-6, 1.4826 * float(numpy.median(numpy.abs(left))))
    found = least_squares(lambda line: rows @ line - y, start, jac=lambda _: rows, loss="soft_l1", f_scale=size)
    return float(found.x[0]), float(found.x[1])
