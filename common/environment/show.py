"""The output of `launch.py env`: the list of sets, one set explained, or its lines for a shell."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from common.environment.merge import export_lines, resolve_environment
from common.environment.sets import BASE, NOT_SET, SETS, TIERS


def export_shell(name: str, environ: Mapping[str, str]) -> str:
    """Shell lines; `eval "$(python launch.py env SET --export)"` sets them for any other framework."""
    return "\n".join(export_lines(resolve_environment(name, environ)))


def settings_table(name: str | None, environ: Mapping[str, str]) -> Table:
    """The variables of set `name` with their sources; without a name, the known variables that this shell sets."""
    table = Table(title=f"--env {name}" if name else "set in this shell")
    table.add_column("variable", no_wrap=True)
    for column in ("value", "set by", "verdict"):
        table.add_column(column, overflow="fold")
    if name:
        for s in resolve_environment(name, environ):
            verdict = s.reason + (f" (only with {s.only_if})" if s.only_if else "")
            table.add_row(s.key, s.value or "(empty)", s.source, verdict)
        return table
    known = {key: reason for part in (BASE, *SETS.values(), *TIERS.values()) for key, (_, reason) in part.items()}
    for key in sorted({**known, **NOT_SET}):
        if key in environ:
            table.add_row(key, environ[key] or "(empty)", "user", verdict_on(key))
    return table


def verdict_on(key: str) -> str:
    """The verdict in NOT_SET, or the reason in each set for the variable."""
    if key in NOT_SET:
        return NOT_SET[key]
    parts = {"base": BASE, **SETS, **TIERS}
    reasons = {reason: name for name, part in parts.items() if key in part for _, reason in [part[key]]}
    return "; ".join(f"{name}: {reason}" for reason, name in reasons.items())


def sets_table() -> Table:
    """A table of all sets and tiers with their variables."""
    table = Table("set", "sets", title="--env SET, or SET+SET+TIER, or a FILE.env")
    for kind, group in (("", SETS), (" (tier)", TIERS)):
        for name, part in group.items():
            table.add_row(name + kind, ", ".join(f"{key}={value}" for key, (value, _) in part.items()))
    return table
