"""The command `forecast`: make a forecast, keep it, and print it with what it rests on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from planning.forecast import CONFIDENCE, DomainForecast, Forecast, keep_forecast, make_forecast
from planning.forecast_request import ForecastRequest
from planning.known_run import read_known_run
from planning.page import name_and_text

MOST_NAMED = 6  # earlier runs that are named in the text; the file names all


def show_forecast(request: ForecastRequest) -> None:
    """Forecast a run, keep the forecast in its folder, and print it.

    Raises:
        UserError: as `planning.forecast.make_forecast`.
    """
    run, forecast = make_forecast(request)
    is_new = keep_forecast(run, forecast)
    if request.json:
        print(json.dumps(asdict(forecast), indent=1))
        return
    curves = read_known_run(run).curves
    outcomes = {
        name: float(curve.losses[-1])
        for name, curve in curves.items()
        if len(curve.steps) and curve.steps[-1] == forecast.num_steps
    }
    print("\n".join(line.rstrip() for line in format_forecast(str(run.path), forecast, outcomes)))
    print("\n".join(name_and_text("kept", f"{run.forecast}" + ("" if is_new else " (the same forecast was there)"))))


def format_forecast(path: str, forecast: Forecast, outcomes: dict[str, float]) -> Iterator[str]:
    """The lines of a forecast.

    Args:
        outcomes: domain -> loss at the end, for a run that has come there.
    """
    yield from name_and_text("run", f"{path}: {describe_moment(forecast)}")
    yield from name_and_text("law", forecast.law)
    for name, one in forecast.domains.items():
        yield ""
        room = (one.high - one.low) / 2
        yield from name_and_text(
            name,
            f"{one.loss:.3f} \u00b1 {room:.3f} nats per token at step {forecast.num_steps} ({CONFIDENCE:.0%} interval)",
        )
        yield from name_and_text(
            "", f"at step 0: {one.start:.3f}, last used validation: {one.now:.3f}; expected in all: {_change(one)}"
        )
        yield from name_and_text("", _origin(one))
        if name in outcomes:
            inside = "inside" if one.low <= outcomes[name] <= one.high else "outside"
            yield from name_and_text(
                "", f"outcome: {outcomes[name]:.3f}, the forecast is {one.loss / outcomes[name] - 1:+.1%} ({inside})"
            )
    for note in forecast.notes:
        yield from name_and_text("note", note)


def describe_moment(forecast: Forecast) -> str:
    """From which part of the run the forecast was made, and how far the run was."""
    part = f"made at step {forecast.step} of {forecast.num_steps} ({forecast.step / forecast.num_steps:.0%})"
    if not forecast.hindsight:
        return part + f", when nothing later was measured (the run was at step {forecast.run_step})"
    return part + f" in hindsight: the run was at step {forecast.run_step}; what was measured later was not used"


def _change(one: DomainForecast) -> str:
    return f"{one.loss - one.start:+.3f}".replace("-", "\u2212")


def _origin(one: DomainForecast) -> str:
    if one.earlier_error is None:
        return (
            "law from the first part of this run alone: what annealing brings is assumed, so expect a wide interval"
            " (finished runs of this kind in the same folder would narrow it)"
        )
    names = ", ".join(one.earlier_runs[:MOST_NAMED])
    more = len(one.earlier_runs) - MOST_NAMED
    return (
        f"law from {len(one.earlier_runs)} earlier runs, each of which it forecast from the others"
        f" with a typical error of {one.earlier_error:.1%}: {names}" + (f" and {more} more" if more > 0 else "")
    )
