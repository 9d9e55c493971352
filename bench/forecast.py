"""How far off forecasts are: forecast every finished run of a folder from its first part, and compare with its end.

`python -m bench.forecast --runs runs --part 0.25`. Runs whose names end in the same number (fc-wsd-3, fc-strong-3) have
the same data seed: none of them is used for a forecast of another. Prints a Markdown table per source of the law.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from common.rundir import RunDir
from planning.forecast import DomainForecast, make_forecast
from planning.forecast_request import ForecastRequest
from planning.known_run import read_known_run


def main() -> None:
    """Forecast and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the run directories")
    parser.add_argument("--part", type=float, default=0.25, help="share of each run that is used")
    parser.add_argument("--only", default="", help="forecast only runs whose seed is among these: 6,7,8")
    parser.add_argument("--learn", default="", help="learn only from runs whose seed is among these: 1,2,3,4,5")
    options = parser.parse_args()
    names = sorted(path.parent.name for path in options.runs.glob("*-*/metrics.jsonl"))
    forecast = [name for name in names if not options.only or _seed(name) in options.only.split(",")]
    learn = [name for name in names if not options.learn or _seed(name) in options.learn.split(",")]
    print_table("other seeds, every schedule", forecast, lambda name: _others(name, learn), options)
    print_table("other seeds, same schedule", forecast, lambda name: _others(name, learn, same=True), options)
    print_table("this run alone", forecast, lambda _: [], options)


def _seed(name: str) -> str:
    return name.rpartition("-")[2]


def _others(name: str, names: list[str], same: bool = False) -> list[str]:
    schedule, _, seed = name.rpartition("-")
    return [one for one in names if _seed(one) != seed and (not same or one.rpartition("-")[0] == schedule)]


def print_table(
    title: str, names: list[str], teachers: Callable[[str], list[str]], options: argparse.Namespace
) -> None:
    """One row per run and domain, and a summary."""
    print(f"\n### Law from {title}\n\n| run | domain | forecast | interval of 95% | outcome | error | inside |")
    print("|---|---|---|---|---|---|---|")
    errors, inside = [], 0
    for name in names:
        like = [str(options.runs / one) for one in teachers(name)]
        request = ForecastRequest(
            run=str(options.runs / name), from_=options.part, like=like or None, alone=not like, runs=str(options.runs)
        )
        outcomes = read_known_run(RunDir.at(options.runs / name)).curves
        for domain, one in make_forecast(request)[1].domains.items():
            outcome = float(outcomes[domain].losses[-1])
            errors.append(100 * (one.loss / outcome - 1))
            held = one.low <= outcome <= one.high
            inside += held
            print(_format_row(name, domain, one, outcome, errors[-1], held))
    sizes = [abs(error) for error in errors]
    within = sum(size <= 2 for size in sizes)
    print(
        f"\nmean {statistics.mean(sizes):.2f}%, largest {max(sizes):.2f}%, {within} of {len(sizes)} within 2%,"
        f" mean with its sign {statistics.mean(errors):+.2f}%; {inside} of {len(sizes)} inside the interval"
    )


def _format_row(name: str, domain: str, one: DomainForecast, outcome: float, error: float, held: bool) -> str:
    interval = f"{one.low:.3f} to {one.high:.3f}"
    cells = (name, domain, f"{one.loss:.3f}", interval, f"{outcome:.3f}", f"{error:+.2f}%", "yes" if held else "no")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
