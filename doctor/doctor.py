"""`launch.py doctor`: what this machine can carry, and which way its ranks can talk. Under a minute."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common import logs, machine_facts
from common.errors import EXIT_PREFLIGHT, UserError
from doctor import ladder
from doctor.checks import Check, checks

BUDGET_S = 55.0  # for everything; what the checks leave is the ladder's
_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def doctor(devices: int | None = None, write: Path | None = None, *, every: bool = False, as_json: bool = False) -> int:
    """Check, climb the ladder, advise.

    Args:
        devices: ranks that a run is to have; None takes the GPUs there are, or two CPU ranks.
        write: where to put the smallest environment set that works.
        every: try the rungs below the first that holds, too.
        as_json: print one JSON object instead of tables.

    Returns:
        0, or 3 if a check or the first rung failed.

    Raises:
        UserError: `devices` or `write` makes no sense.
    """
    if devices is not None and devices < 1:
        raise UserError("--devices must be positive", expected="1 or more", found=str(devices), do="--devices 2")
    logs.silence_child_processes()
    logging.captureWarnings(True)
    start, console = time.monotonic(), Console(stderr=as_json)
    looked = list(checks(devices))
    console.print(_checks_table(looked))
    gpus = len(machine_facts.query_gpus().visible)
    ranks = devices or (gpus or 2)
    steps = ladder.rungs(gpus, min(ranks, gpus) if gpus else ranks)
    results = list(_told(steps, console, BUDGET_S - (time.monotonic() - start), every))
    console.print(_ladder_table(results))
    best = next((result for result in results if not result.failed), None)
    for line in _advice(looked, results, best):
        console.print(line, markup=False, highlight=False)
    console.print(f"{time.monotonic() - start:.1f} s", highlight=False)
    if as_json:
        print(json.dumps({"checks": [asdict(one) for one in looked], "rungs": [asdict(one) for one in results]}))
    if write is not None and best is not None:
        _write(write, best, results)
        console.print(f"wrote {write}: --env {_as_layer(write)}, or `source {write}`", markup=False, highlight=False)
    failed = any(one.level == "error" for one in looked) or best is None or best is not results[0]
    return EXIT_PREFLIGHT if failed else 0


def _told(steps: list[ladder.Rung], console: Console, budget_s: float, every: bool) -> list[ladder.Result]:
    found = []
    for result in ladder.climb(steps, budget_s, every=every):
        found.append(result)
        word = f"fails in {result.failed}" if result.failed else "works"
        print(f"{result.rung.name}: {word} ({result.wall_s:.1f} s)", file=sys.stderr)
    return found


def _checks_table(looked: list[Check]) -> Table:
    table = Table("check", "", "found", "do", title="this machine")
    for one in looked:
        colour = _COLOURS[one.level]
        table.add_row(one.name, f"[{colour}]{one.level}[/]", _plain(one.found), _plain(one.do))
    return table


def _ladder_table(results: list[ladder.Result]) -> Table:
    table = Table("way", "", "all-reduce", "0.5B gradients", "why not", title="how ranks can talk, best first")
    for result in results:
        state = f"[red]fails: {result.failed}[/]" if result.failed else "[green]works[/]"
        rate = "".join(f"{value:.2f} GB/s" for value in [*result.bandwidth.values()][-1:])
        seconds = "" if result.step_s is None else f"{result.step_s:.3f} s"
        table.add_row(result.rung.name, state, rate, seconds, _plain(result.why))
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _advice(looked: list[Check], results: list[ladder.Result], best: ladder.Result | None) -> list[str]:
    """What to do now, in one to three lines."""
    lines = [f"{sum(one.level == 'error' for one in looked)} check(s) failed: see the column `do`"]
    if not any(one.level == "error" for one in looked):
        lines = []
    if best is None:
        return [*lines, "No way works here: mend the checks above, then run this again."]
    if best is results[0]:
        return [*lines, f"{best.rung.name}: works as it is; no variable needs to be set."]
    wanted = " ".join(f"{key}={value}" for key, (value, _) in best.rung.env.items())
    how = f" (--env {best.rung.layer})" if best.rung.layer else ""
    fewer = best.rung.world_size < results[0].rung.world_size
    lines.append(f"{best.rung.name} is the best that works" + (f": {wanted}{how}" if wanted else ""))
    lines += [
        f"Your environment has {key}={os.environ[key]}, which wins over any set: change it there."
        for key, (value, _) in best.rung.env.items()
        if os.environ.get(key, value) != value
    ]
    if fewer:
        lines.append("One rank only: --devices 1; the global batch stays, by accumulation.")
    return lines


def _write(path: Path, best: ladder.Result, results: list[ladder.Result]) -> None:
    """The smallest set that works, as a file that a shell and --env can read."""
    lines = [f"# python launch.py doctor --write {path}: {best.rung.name} works"]
    lines += [f"# {one.rung.name}: {one.failed}: {' '.join(one.why.split())}" for one in results if one.failed]
    lines += [f"export {key}={shlex.quote(value)} # {why}" for key, (value, why) in best.rung.env.items()]
    if not best.rung.env:
        lines.append("# nothing to set")
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as problem:
        raise UserError(
            f"cannot write {path}",
            expected="a file in a folder that is there",
            found=str(problem),
            do="--write FILE.env",
        ) from None


def _as_layer(path: Path) -> str:
    return str(path) if "/" in str(path) or path.suffix == ".env" else f"./{path}"
