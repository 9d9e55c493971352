"""The output of `launch.py env`: the list of sets, one set or one variable explained, or lines for a shell."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.table import Table

from common.environment.known import KNOWN, explain
from common.environment.merge import USER, Setting, Site, export_lines, resolve_environment
from common.environment.sets import BASE, PURPOSES, SETS, TIERS
from common.environment.shell import shell_settings

_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")


def is_variable(name: str) -> bool:
    """Whether `name` looks like an environment variable, not like a set: NCCL_BUFFSIZE."""
    return bool(_VARIABLE.fullmatch(name)) or name in KNOWN


def export_shell(name: str, environ: Mapping[str, str], site: Site | None = None) -> str:
    """Shell lines; `eval "$(python launch.py env SET --export)"` sets them for any other framework."""
    return "\n".join(export_lines(resolve_environment(name, environ, site=site)))


def settings_table(name: str | None, environ: Mapping[str, str], site: Site | None = None) -> Table:
    """The variables of set `name` and of the site, and what else this shell sets, each with its source and verdict."""
    settings = resolve_environment(name, environ, site=site) if name else []
    extra = shell_settings(environ, settings, same_files=True)
    taken = {s.key for s in (*settings, *extra)}
    extra += [
        Setting(key, environ[key], USER, explain(key).text) for key in KNOWN if key in environ and key not in taken
    ]
    table = _table(f"--env {name}" + (f" --cluster {site.file}" if site else "") if name else "set in this shell")
    for s in settings:
        table.add_row(s.key, s.value or "(empty)", s.source, explain(s.key).since, _verdict(s))
    for s in sorted(extra, key=lambda setting: setting.key):
        found = explain(s.key)
        table.add_row(s.key, s.value or "(empty)", s.source, found.since, found.text)
    return table


def _verdict(setting: Setting) -> str:
    return setting.reason + (f" (only with {setting.only_if})" if setting.only_if else "")


def variable_table(key: str, environ: Mapping[str, str]) -> Table:
    """What is known of one variable, and whether this shell sets it."""
    found, table = explain(key), _table(key)
    table.add_row(key, environ.get(key, "(not set)"), USER if key in environ else "", found.since, found.text)
    return table


def _table(title: str) -> Table:
    table = Table(title=title)
    table.add_column("variable", no_wrap=True)
    for column in ("value", "set by", "since", "verdict"):
        table.add_column(column, overflow="fold")
    return table


def sets_table() -> Table:
    """A table of all sets and tiers with their variables."""
    table = Table(
        "set", "for", "sets", title="--env SET, or SET+SET+TIER, or a FILE.env; +SET adds to the recipe's own"
    )
    for row in _sets_rows():
        table.add_row(*row)
    return table


def sets_markdown() -> str:
    """The same table for docs/environment.md."""
    rows = [(f"`{name}`", purpose, f"`{sets}`") for name, purpose, sets in _sets_rows()]
    return "\n".join(f"| {' | '.join(row)} |" for row in (("set", "for", "sets"), ("---", "---", "---"), *rows)) + "\n"


def _sets_rows() -> list[tuple[str, str, str]]:
    parts = {"base": BASE, **SETS, **TIERS}
    return [
        (name, PURPOSES[name], " ".join(f"{key}={value}" for key, (value, _) in part.items()))
        for name, part in parts.items()
    ]
