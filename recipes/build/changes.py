"""Changes to NeMo-Run's configuration by dotted path, each with its reason."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import fiddle as fdl

if TYPE_CHECKING:
    import nemo_run as run


def apply_changes(recipe: run.Partial, changes: Iterable[tuple[str, Any, str]]) -> list[str]:
    """Set each (path, value, reason) in place; a slot that is left to NeMo's default (no config) stays as it is.

    Returns:
        one line per change: `path: old -> new (reason)`.
    """
    lines = []
    for path, value, reason in changes:
        slot, _, name = path.rpartition(".")
        owner = functools.reduce(lambda at, step: getattr(at, step, None), slot.split("."), recipe)
        if not isinstance(owner, fdl.Buildable):
            continue
        old = getattr(owner, name, None)
        if old == value or (old is None and value is False):
            continue
        setattr(owner, name, value)
        lines.append(f"{path}: {old} -> {value} ({reason})")
    return lines
