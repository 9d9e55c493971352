"""The tables of `launch.py doctor`."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from doctor.checks import Check
from doctor.transports import STEPS, TransportResult

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


def checks_table(checks: list[Check]) -> Table:
    """The checks of this machine, with what to do about each."""
    table = Table("check", "", "found", "do", title="this machine")
    for check in checks:
        colour = _COLOURS[check.level]
        table.add_row(check.name, f"[{colour}]{check.level}[/]", escape(check.found), escape(check.do))
    return table


def transports_table(results: list[TransportResult]) -> Table:
    """The transports that were tested, best first, with their cost."""
    table = Table("transport", "", "all-reduce", "0.5B gradients", "why not")
    table.title = "how ranks can communicate, best first"
    for result in results:
        state = f"[red]fails: {result.failed}[/]" if result.failed else "[green]works[/]"
        rate = "".join(f"{value:.2f} GB/s" for value in [*result.bandwidth.values()][-1:])
        seconds = "" if result.gradient_seconds is None else f"{result.gradient_seconds:.3f} s"
        table.add_row(result.transport.name, state, rate, seconds, escape(result.why))
    return table


def steps_table(result: TransportResult) -> Table:
    """Every step of a transport's test: whether it works, what it found, and its seconds on rank 0."""
    table = Table("step", "", "s", "found", title=f"step by step: {result.transport.name}")
    for step in STEPS if not result.failed or result.failed in STEPS else (result.failed,):  # `torch` comes before them
        seconds = f"{result.step_seconds[step]:.2f}" if step in result.step_seconds else ""
        if step == result.failed:
            table.add_row(step, "[red]fails[/]", seconds, escape(result.why))
            break
        if step in result.found:
            table.add_row(step, "[green]ok[/]", seconds, escape(_describe(result, step)))
    return table


def _describe(result: TransportResult, step: str) -> str:
    if step != "bandwidth":
        return str(result.found[step])
    return ", ".join(f"{value:.2f} GB/s at {size / 2**20:g} MiB" for size, value in result.bandwidth.items())
