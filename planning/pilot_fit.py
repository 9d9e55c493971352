"""From the results of a pilot's trainings to a recommended learning rate and replay share, with its uncertainty.

A point is trained at two lengths, and the change of each domain's validation loss since step 0 is continued in the
logarithm of the length, to the length of the run:

    change(N) = change(n) + (change(n) - change(n/2)) log2(N/n)

because the best learning rate depends on the length: Bjorck et al. 2024, arXiv 2409.19913, find its power law from
shorter runs and continue that. What was continued is then taken as

    change = c + b x + a x^2 + d z + e x z        x = log(lr / lr of the recipe), z = log(share / share of the recipe)

by least squares: the second-order expansion around the recipe's point, as the loss is fitted over the logarithm of the
learning rate by Bjorck et al. 2024, arXiv 2409.19913. The replay share has two values and so no square. Nothing outside
what was tried is recommended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from common.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[numpy.float64]

GRID = 81  # points of each axis on which the best one is looked for


@dataclass(frozen=True)
class Result:
    """What one training came to.

    Args:
        name: of the training.
        rate: peak learning rate.
        share: replay share, None without replay.
        steps: its length.
        changes: domain -> validation loss at its end minus at step 0, nats per token; NaN if it diverged.
    """

    name: str
    rate: float
    share: float | None
    steps: int
    changes: Mapping[str, float]


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Args:
        learn: domains whose changes are summed.
        keep: domains whose change may not be above `most_forgotten`.
        most_forgotten: nats per token; None for no such bound.
    """

    learn: tuple[str, ...]
    keep: tuple[str, ...] = ()
    most_forgotten: float | None = None

    def describe(self) -> str:
        text = "the smallest sum of the changes of " + ", ".join(self.learn)
        if self.most_forgotten is None or not self.keep:
            return text
        return f"{text}, with no more than {self.most_forgotten:+g} for {', '.join(self.keep)}"


@dataclass(frozen=True)
class Surface:
    """The fitted law of every domain.

    Args:
        rate, share: the recipe's, where x and z are 0.
        coefficients: domain -> float[3] or float[5]: c, b, a, d, e.
    """

    rate: float
    share: float | None
    coefficients: Mapping[str, Floats]

    def changes(self, rates: Floats, shares: Floats | None) -> dict[str, Floats]:
        """Domain -> change at each of some points."""
        rows = _rows(rates, shares, self.rate, self.share)
        return {name: rows @ found for name, found in self.coefficients.items()}


@dataclass(frozen=True)
class Recommendation:
    """The best point inside what was tried.

    Args:
        rate, share: there; share is None without replay.
        rate_range, share_range: smallest and largest that are recommended when one training is left out.
        changes: domain -> change that the law expects there after the whole run.
        recipe_changes: the same at the recipe's own point.
        gain: objective at the recipe's point minus here; above 0 is better.
        gain_range: smallest and largest when one training is left out.
        notes: what to know about it.
    """

    rate: float
    share: float | None
    rate_range: tuple[float, float]
    share_range: tuple[float, float] | None
    changes: dict[str, float]
    recipe_changes: dict[str, float]
    gain: float
    gain_range: tuple[float, float]
    notes: tuple[str, ...]


def _rows(rates: Floats, shares: Floats | None, rate: float, share: float | None) -> Floats:
    x = numpy.log(rates / rate)
    columns = [numpy.ones_like(x), x, x**2]
    if shares is not None and share is not None:
        z = numpy.log(shares / share)
        columns += [z, x * z]
    return numpy.stack(columns, axis=1)


def continue_results(results: Sequence[Result], run_steps: int) -> list[Result]:
    """The change of each point as it is expected after the whole run, from its two lengths."""
    found = []
    for longer in results:
        for shorter in results:
            if (shorter.rate, shorter.share) == (longer.rate, longer.share) and shorter.steps < longer.steps:
                far = math.log(run_steps / longer.steps) / math.log(longer.steps / shorter.steps)
                changes = {name: end + far * (end - shorter.changes[name]) for name, end in longer.changes.items()}
                name = longer.name.rpartition("-")[0]
                found.append(Result(name, longer.rate, longer.share, run_steps, changes))
    return found


def fit_surface(results: Sequence[Result], rate: float, share: float | None) -> Surface:
    """Least squares for each domain."""
    rates = numpy.array([one.rate for one in results])
    shares = None if share is None else numpy.array([one.share for one in results], dtype=float)
    rows = _rows(rates, shares, rate, share)
    names = list(results[0].changes)
    found = {
        name: numpy.linalg.lstsq(rows, numpy.array([one.changes[name] for one in results]), rcond=None)[0]
        for name in names
    }
    return Surface(rate, share, found)


def recommend(results: Sequence[Result], rate: float, share: float | None, objective: Objective) -> Recommendation:
    """The best point, and how far it moves when one training is left out.

    Args:
        rate, share: of the recipe.

    Raises:
        UserError: too few trainings came to a finite loss.
    """
    good = [one for one in results if all(numpy.isfinite(list(one.changes.values())))]
    least = 3 if share is None else 5
    if len(good) < least or len({one.rate for one in good}) < 3:
        lost = ", ".join(one.name for one in results if one not in good) or "none"
        raise UserError(
            "too few trainings of the pilot came to a finite loss",
            expected=f"at least {least}, of 3 learning rates",
            found=f"{len(good)}; without a finite loss: {lost}",
            do="--rates 0.1,0.33,1 --name ANOTHER",
        )
    best_rate, best_share, kept = _best(fit_surface(good, rate, share), results, objective)
    again = [good[:i] + good[i + 1 :] for i in range(len(good))] if len(good) > least else []
    others = [_best(fit_surface(some, rate, share), results, objective) for some in again]
    surface = fit_surface(good, rate, share)
    gains = [_gain(fit_surface(some, rate, share), objective, best_rate, best_share) for some in again]
    gain = _gain(surface, objective, best_rate, best_share)
    rates = [best_rate, *(one[0] for one in others)]
    shares = [one for one in (best_share, *(other[1] for other in others)) if one is not None]
    return Recommendation(
        rate=best_rate,
        share=best_share,
        rate_range=(min(rates), max(rates)),
        share_range=(min(shares), max(shares)) if shares else None,
        changes=_at(surface, best_rate, best_share),
        recipe_changes=_at(surface, rate, share),
        gain=gain,
        gain_range=(min(gain, *gains, gain), max(gain, *gains, gain)),
        notes=tuple(_notes(results, good, best_rate, best_share, kept, again != [])),
    )


def _best(surface: Surface, results: Sequence[Result], objective: Objective) -> tuple[float, float | None, bool]:
    """Rate, share, and whether the bound on forgetting is kept there (else it is the point that forgets least)."""
    tried = [one.rate for one in results]
    rates = numpy.geomspace(min(tried), max(tried), GRID)
    shares = None
    if surface.share is not None:
        known = [one.share for one in results if one.share is not None]
        rates, shares = (
            axis.ravel() for axis in numpy.meshgrid(rates, numpy.geomspace(min(known), max(known), GRID // 2))
        )
    changes = surface.changes(rates, shares)
    wanted = sum((changes[name] for name in objective.learn), numpy.zeros(len(rates)))
    kept = True
    if objective.most_forgotten is not None and objective.keep:
        worst = numpy.max([changes[name] for name in objective.keep], axis=0)
        allowed = worst <= objective.most_forgotten
        kept = bool(allowed.any())
        wanted = numpy.where(allowed, wanted, numpy.inf) if kept else worst
    place = int(numpy.argmin(wanted))
    return float(rates[place]), None if shares is None else float(shares[place]), kept


def _at(surface: Surface, rate: float, share: float | None) -> dict[str, float]:
    shares = None if share is None else numpy.array([share])
    return {name: float(values[0]) for name, values in surface.changes(numpy.array([rate]), shares).items()}


def _gain(surface: Surface, objective: Objective, rate: float, share: float | None) -> float:
    here, recipe = _at(surface, rate, share), _at(surface, surface.rate, surface.share)
    return sum(recipe[name] - here[name] for name in objective.learn)


def _notes(
    results: Sequence[Result], good: Sequence[Result], rate: float, share: float | None, kept: bool, checked: bool
) -> list[str]:
    notes = []
    if not kept:
        notes.append("no point that was tried keeps the bound on forgetting: this is the one that forgets least")
    rates = [one.rate for one in results]
    if rate in (min(rates), max(rates)) or numpy.isclose(rate, [min(rates), max(rates)]).any():
        notes.append(f"the learning rate is at the edge of what was tried ({min(rates):g} to {max(rates):g})")
    shares = [one.share for one in results if one.share is not None]
    if share is not None and numpy.isclose(share, [min(shares), max(shares)]).any():
        notes.append(f"the replay share is at the edge of what was tried ({min(shares):g} to {max(shares):g})")
    lost = [one.name for one in results if one not in good]
    if lost:
        notes.append("without a finite loss, and left out: " + ", ".join(lost))
    if not checked:
        notes.append("as many trainings as the law has parameters: nothing says how uncertain it is")
    return notes
