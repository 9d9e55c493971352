"""Forecast the final validation loss of every domain of a run from its first part, and keep the forecast."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from common.commands import launch_command
from common.errors import ProjectError, UserError, unknown_name
from common.files import write_atomic
from common.json_files import read_json_object
from common.rundir import RunDir, find_run
from data.resolve_blend import load_run_blend
from planning.forecast_request import ForecastRequest
from planning.known_run import KnownRun, can_teach, find_runs_like, read_known_run
from planning.loss_law import Curve, fit_alone, fit_earlier

if TYPE_CHECKING:
    from planning.loss_law import Floats
    from recipes.plan import Plan

LEAST_EARLIER = 2  # runs that a law can be learned from: each is forecast from the others
LEAST_POINTS = 5  # validations of the first part that a law can be learned from without earlier runs
CONFIDENCE = 0.95  # of the interval
LAW = "loss(s) = level + A (1 + S1/w)^-a - C S2 (Tissue et al. 2024, arXiv 2408.11029; planning/loss_law.py)"


@dataclass(frozen=True)
class DomainForecast:
    """The forecast of one domain; losses in nats per token.

    Args:
        loss, low, high: at the end of the run, with the interval of `CONFIDENCE`.
        now: at the last validation that was used.
        start: at step 0.
        parameters: of the law.
        earlier_runs: that the law was learned from; empty if from this run alone.
        earlier_error: root mean square of (forecast / outcome - 1) over these runs, each forecast from the others;
            None without them.
        curve: (step, loss, low, high) from there to the end.
    """

    loss: float
    low: float
    high: float
    now: float
    start: float
    parameters: dict[str, Any]
    earlier_runs: tuple[str, ...]
    earlier_error: float | None
    curve: tuple[tuple[int, float, float, float], ...]


@dataclass(frozen=True)
class Forecast:
    """One forecast of a run.

    Args:
        made: when, in ISO 8601, UTC.
        step: nothing after this step was used.
        num_steps: of the whole run.
        run_step: the newest step of the run that was recorded then.
        hindsight: validations after `step` were recorded already, and not used.
        law: in words.
        notes: what the forecast does not know.
        domains: name -> its forecast.
    """

    made: str
    step: int
    num_steps: int
    run_step: int
    hindsight: bool
    law: str
    notes: tuple[str, ...]
    domains: dict[str, DomainForecast]


def make_forecast(request: ForecastRequest) -> tuple[RunDir, Forecast]:
    """Forecast a run, without keeping it.

    Raises:
        UserError: no such run or domain, a part that the run has not reached, or too little to forecast from.
    """
    root = Path(request.runs)
    run = find_run(request.run, root)
    known = read_known_run(run)
    cut = _cut(known, request)
    part = cut / known.plan.max_steps
    like: list[KnownRun] = []
    if request.like:
        like = [read_known_run(_other(find_run(name, root), run)) for name in request.like]
    elif not request.alone:
        like = list(find_runs_like(known, run.path.parent))
    domains = {name: _forecast_domain(known, name, cut, part, like) for name in _names(known, request)}
    later = any(len(known.curves[name].between(cut, known.plan.max_steps).steps) for name in domains)
    return run, Forecast(
        made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        step=cut,
        num_steps=known.plan.max_steps,
        run_step=known.step,
        hindsight=later,
        law=LAW,
        notes=(*_notes(known.plan), *_notes_on_rising(domains)),
        domains=domains,
    )


def _notes(plan: Plan) -> Iterator[str]:
    """What moves on the way and the law does not know."""
    try:
        has_stages = plan.blend is not None and bool(load_run_blend(plan.blend).stages)
    except ProjectError:  # its file is gone
        has_stages = False
    if has_stages:
        yield "the blend changes on the way, which the law does not know"
    if plan.forgetting_budget is not None:
        yield "the replay share follows a forgetting budget, which the law does not know"


def _notes_on_rising(domains: dict[str, DomainForecast]) -> Iterator[str]:
    for name, one in domains.items():
        if not one.earlier_runs and one.now > one.start:
            yield (
                f"{name} has risen since step 0, and this run alone cannot tell whether it falls again:"
                " most measured outcomes lay outside the interval (docs/measurements/forecast.md)"
            )


def _other(other: RunDir, run: RunDir) -> RunDir:
    if other.path.resolve() == run.path.resolve():
        raise UserError(
            "a run cannot be forecast from itself",
            expected="--like with another run",
            found=f"--like {other.name}",
            do="leave it out",
        )
    return other


def _command(run: RunDir) -> str:
    """What to type to forecast a finished run from its first quarter."""
    return launch_command("forecast", run.as_argument, "--from", "0.25")


def _cut(known: KnownRun, request: ForecastRequest) -> int:
    """The last step that may be used."""
    total = known.plan.max_steps
    validated = max((int(curve.steps[-1]) for curve in known.curves.values() if len(curve.steps)), default=0)
    asked = request.at if request.at is not None else None if request.from_ is None else int(request.from_ * total)
    if asked is None:
        if validated >= total:
            raise UserError(
                f"{known.run.path} is finished: there is nothing left to forecast",
                expected="which part of it is to be used",
                found=f"step {known.step} of {total}",
                do=_command(known.run),
            )
        return validated
    if not 0 < asked < total:
        raise UserError(
            "the part that is to be used is not inside the run",
            expected=f"a step from 1 to {total - 1}",
            found=f"step {asked}",
            do=_command(known.run),
        )
    if asked > known.step:
        raise UserError(
            f"{known.run.path} has not come so far",
            expected=f"a step up to {known.step}",
            found=f"step {asked} of {total}",
            do="wait, or use a smaller part: " + _command(known.run),
        )
    if validated < asked and asked % known.plan.val_check_interval == 0 and known.curves:
        raise UserError(  # a step is recorded before it is validated
            f"{known.run.path} is not validated at step {asked} yet",
            expected="its validation, which is due at that step",
            found=f"the newest one, at step {validated}",
            do="wait until it is recorded, or use a smaller part: " + _command(known.run),
        )
    return asked


def _names(known: KnownRun, request: ForecastRequest) -> list[str]:
    if not known.curves:
        raise UserError(
            f"{known.run.path} has no validation yet",
            expected=f"rows with a validation in {known.run.metrics}",
            found="none",
            do=f"train on; the next one is due at a multiple of {known.plan.val_check_interval} steps",
        )
    if request.domain is None:
        return list(known.curves)
    if request.domain not in known.curves:
        raise unknown_name("domain", request.domain, known.curves, "leave --domain out", typed="--domain {}")
    return [request.domain]


def _forecast_domain(known: KnownRun, name: str, cut: int, part: float, like: list[KnownRun]) -> DomainForecast:
    if name not in known.starts:
        raise UserError(
            f"{name} was not validated at step 0",
            expected=f"the loss of the base in {known.run.metrics}",
            found="the first validation is at step "
            + str(min((int(step) for step in known.curves[name].steps), default="none")),
            do="start the run again; every run of this version validates before its first step",
        )
    curve = known.curves[name]
    teachers = [one for one in like if name in one.curves and can_teach(one.curves[name], part)]
    if len(teachers) < LEAST_EARLIER:
        return _from_itself(known, name, curve, cut)
    points = curve.level_points(cut)
    if not len(points.steps):
        raise _too_few(known, name, 0, 1, cut)
    earlier = fit_earlier([one.curves[name] for one in teachers], part)
    level = earlier.fit.level(points)
    steps = _later_steps(known, cut)
    losses = level + earlier.fit.changes(curve.rates, steps)
    errors = numpy.sqrt((earlier.errors**2).mean(axis=0))
    deviations = numpy.interp(steps / curve.num_steps, earlier.fractions, errors)
    outcomes = numpy.array([one.curves[name].losses[-1] for one in teachers])
    fit = earlier.fit
    return _row(
        (steps, losses, _quantile(len(teachers) - 1) * deviations),
        now=float(points.losses[-1]),
        start=known.starts[name],
        parameters={
            "level": level,
            "A": fit.slope,
            "C": fit.annealing,
            "peak": fit.peak,
            "a": fit.shape.exponent,
            "w": fit.shape.width,
            "memory": fit.shape.memory,
        },
        earlier_runs=tuple(str(one.run.path) for one in teachers),
        earlier_error=float(numpy.sqrt(((earlier.errors[:, -1] / outcomes) ** 2).mean())),
    )


def _from_itself(known: KnownRun, name: str, curve: Curve, cut: int) -> DomainForecast:
    points = curve.between(curve.first_step - 1, cut)
    if len(points.steps) < LEAST_POINTS:
        raise _too_few(known, name, len(points.steps), LEAST_POINTS, cut)
    alone = fit_alone(curve, cut, known.starts[name])
    steps = _later_steps(known, cut)
    losses, deviations = alone.predict(curve.rates, steps)
    best = int(numpy.argmax(alone.weights))
    fit = alone.fits[best]
    return _row(
        (steps, losses, _quantile(None) * deviations),
        now=float(points.losses[-1]),
        start=known.starts[name],
        parameters={
            "shapes": len(alone.fits),
            "largest weight": float(alone.weights[best]),
            "A": fit.slope,
            "C": fit.annealing,
            "a": fit.shape.exponent,
            "w": fit.shape.width,
            "memory": fit.shape.memory,
        },
        earlier_runs=(),
        earlier_error=None,
    )


def _later_steps(known: KnownRun, cut: int) -> Any:
    total = known.plan.max_steps
    return numpy.unique(numpy.linspace(cut, total, 41).round().astype(int))


def _row(curve: tuple[Any, Floats, Floats], **fields: Any) -> DomainForecast:
    steps, losses, room = curve
    points = [(int(s), float(x), float(x - r), float(x + r)) for s, x, r in zip(steps, losses, room, strict=True)]
    _, loss, low, high = points[-1]
    return DomainForecast(loss=loss, low=low, high=high, curve=tuple(points), **fields)


def _quantile(freedom: int | None) -> float:
    """Standard deviations to either side of an interval of `CONFIDENCE`: Student's t, or the normal for None."""
    from scipy import special

    upper = (1 + CONFIDENCE) / 2
    return float(special.ndtri(upper) if freedom is None else special.stdtrit(freedom, upper))


def _too_few(known: KnownRun, name: str, found: int, least: int, cut: int) -> UserError:
    curve = known.curves[name]
    after = curve.first_step
    every = max(1, (cut - after) // (2 * LEAST_POINTS))
    return UserError(
        f"{name} was validated too seldom for a forecast from step {cut}",
        expected=f"at least {least} validation(s) after step {after - 1} (the warm-up, or a twentieth of the run)"
        f" until step {cut}" + ("" if least == 1 else f", or {LEAST_EARLIER} finished runs of this kind beside it"),
        found=f"{found}, one every {known.plan.val_check_interval} steps",
        do=f"use a larger part of the run, or validate more often: trainer.val_check_interval={every}",
    )


def read_forecasts(run: RunDir) -> list[dict[str, Any]]:
    """The forecasts of a run, oldest first."""
    found = (read_json_object(run.forecast) or {}).get("forecasts")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def keep_forecast(run: RunDir, forecast: Forecast) -> bool:
    """Add a forecast to runs/NAME/forecast.json, whose earlier ones stay as they are.

    Returns:
        False if the same forecast is there already.
    """
    kept = read_forecasts(run)
    row = json.loads(json.dumps(asdict(forecast)))
    if any({**one, "made": ""} == {**row, "made": ""} for one in kept):
        return False
    write_atomic(run.forecast, json.dumps({"forecasts": [*kept, row]}, indent=1) + "\n")
    return True
