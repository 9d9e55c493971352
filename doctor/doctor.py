"""`launch.py doctor`: check this machine, and find how its ranks can communicate. Takes under a minute."""

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

from common import logs, machine_facts
from common.environment.merge import resolve_environment, restart_with_preloads
from common.errors import EXIT_PREFLIGHT, UserError
from doctor.checks import Check, run_checks
from doctor.network import check_network
from doctor.tables import checks_table, steps_table, transports_table
from doctor.transport_check import check_transports
from doctor.transports import RankLayout, Transport, TransportResult, list_transports, transport_of_set

BUDGET_S = 55.0  # for everything; the transports get what the checks leave


def run_doctor(
    devices: int | None = None,
    write: Path | None = None,
    env: str | None = None,
    *,
    every: bool = False,
    as_json: bool = False,
) -> int:
    """Check the machine, test the transports, and print what to do.

    Args:
        devices: number of ranks a run is to have; None takes all visible GPUs, or two CPU ranks.
        write: file to write the smallest environment that works to.
        env: an environment set: its transport, and no other, is tested.
        every: also test the transports after the first that works.
        as_json: print one JSON object on standard output; the tables go to standard error.

    Returns:
        0, or 3 if a check or the best transport failed.

    Raises:
        UserError: `devices` is not positive, there is no such set, or `write` cannot be written.
    """
    if devices is not None and devices < 1:
        raise UserError("--devices must be positive", expected="1 or more", found=str(devices), do="--devices 2")
    logs.silence_child_processes()
    logging.captureWarnings(True)
    start, console = time.monotonic(), Console(stderr=as_json)
    checks = [*run_checks(devices), *check_network()]
    console.print(checks_table(checks))
    gpus = len(machine_facts.query_gpus().visible)
    ranks = devices or (gpus or 2)
    ranks = min(ranks, gpus) if gpus else ranks
    transports = [_from_set(env, gpus, ranks)] if env else list_transports(gpus, ranks)
    results = _test_transports(transports, BUDGET_S - (time.monotonic() - start), every)
    console.print(transports_table(results))
    best = next((result for result in results if not result.failed), None)
    console.print(steps_table(best or results[-1]))
    for line in _advise(checks, results, best):
        console.print(line, markup=False, highlight=False)
    mode = best.transport.mode if best else "none"
    console.print(f"mode: {mode} ({time.monotonic() - start:.1f} s)", highlight=False)
    if as_json:
        found = {"checks": [asdict(c) for c in checks], "transports": [asdict(r) for r in results]}
        print(json.dumps({**found, "mode": mode}))
    if write is not None and best is not None:
        _write_env(write, best, results)
        console.print(f"wrote {write}: --env +{_env_option(write)}, or `source {write}`", markup=False, highlight=False)
    failed = any(check.level == "error" for check in checks) or best is None or best is not results[0]
    return EXIT_PREFLIGHT if failed else 0


def _from_set(name: str, gpus: int, ranks: int) -> Transport:
    """The transport of an environment set; starts this command again if the set loads a library before all others."""
    settings = resolve_environment(
        name.removeprefix("+"), os.environ, RankLayout(ranks, accelerator="gpu" if gpus else "cpu")
    )
    restart_with_preloads(settings, os.environ)
    return transport_of_set(name, settings, gpus, ranks)


def _test_transports(transports: list[Transport], budget_s: float, every: bool) -> list[TransportResult]:
    """Test them, with a line on standard error for each result."""
    results = []
    for result in check_transports(transports, budget_s, every=every):
        results.append(result)
        outcome = f"fails in {result.failed}" if result.failed else "works"
        print(f"{result.transport.name}: {outcome} ({result.wall_s:.1f} s)", file=sys.stderr)
    return results


def _advise(checks: list[Check], results: list[TransportResult], best: TransportResult | None) -> list[str]:
    """What to do now, in one to three lines."""
    failed = sum(check.level == "error" for check in checks)
    lines = [f"{failed} check(s) failed: see the column `do`."] if failed else []
    if best is None:
        return [*lines, "No transport works here: follow the column `do` above, then run this again."]
    transport = best.transport
    if best is results[0] and transport.env_set:
        return [*lines, f"{transport.name} works, as it is written."]
    if best is results[0]:
        return [*lines, f"The ranks communicate with {transport.name} as it is: no variable needs to be set for that."]
    variables = " ".join(f"{key}={value}" for key, (value, _) in transport.env.items())
    env_set = f" (--env +{transport.env_set})" if transport.env_set else ""
    lines.append(f"{transport.name} is the best that works" + (f": {variables}{env_set}" if variables else "."))
    lines += [
        f"Your environment has {key}={os.environ[key]}, which overrides every environment set: change it there."
        for key, (value, _) in transport.env.items()
        if os.environ.get(key, value) != value
    ]
    if transport.world_size < results[0].transport.world_size:
        lines.append("Use one rank: --devices 1; gradient accumulation keeps the global batch.")
    return lines


def _write_env(path: Path, best: TransportResult, results: list[TransportResult]) -> None:
    """Write the smallest environment that works, as a file that a shell and --env can read."""
    lines = [f"# python launch.py doctor --write {path}: {best.transport.name} works"]
    lines += [f"# {r.transport.name}: {r.failed}: {' '.join(r.why.split())}" for r in results if r.failed]
    lines += [f"export {key}={shlex.quote(value)} # {why}" for key, (value, why) in best.transport.env.items()]
    if not best.transport.env:
        lines.append("# nothing to set")
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as problem:
        raise UserError(
            f"cannot write {path}",
            expected="a file in an existing folder",
            found=str(problem),
            do="--write FILE.env",
        ) from None


def _env_option(path: Path) -> str:
    """The path as --env recognises a file: with a slash or the ending .env."""
    return str(path) if "/" in str(path) or path.suffix == ".env" else f"./{path}"
