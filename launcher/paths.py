"""Every path=value that a recipe takes, read from the classes that it configures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common import logs
from recipes import registry
from recipes.overrides import names_of


def list_paths(recipe: str, pattern: str = "") -> list[str]:
    """`path=value` lines, sorted; what is not set in the recipe shows its default.

    Raises:
        UserError: an unknown recipe.
    """
    logs.log_to_console()
    partial = registry.resolve(recipe)()
    return sorted(line for line in walk(partial, "") if pattern in line)


def walk(owner: Any, prefix: str) -> Iterator[str]:
    """`path=value` of every argument of a configuration and of those inside it, each path after `prefix`."""
    for name in names_of(owner):
        try:
            value = getattr(owner, name, None)
        except ValueError:  # a dataclass default that a function makes
            value = None
        if hasattr(value, "__fn_or_cls__"):
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_shown(value)}"


def _shown(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)
