"""Unknown override paths found before NeMo is imported: in a list of the paths that NeMo's classes take.

The list holds for the versions in its first line, and for recipes whose function returns what `assemble.pretrain`
makes; for others the paths are checked when NeMo has been imported (`overrides.apply_to_recipe`). It is written by
`UPDATE_GOLDENS=1 pytest tests/recipes/test_recipes.py -k known_paths`, and compared with the classes by the same test.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from recipes.overrides import Override, unknown_path
from recipes.registry import Recipe

FILE = Path(__file__).with_name("known_paths.txt")
_LIBRARIES = ("nemo_toolkit", "megatron-core", "lightning")
_PLAIN = {"recipes.build.assemble", "pretrain"}  # the names in a function that changes nothing


@functools.cache
def versions() -> str:
    """The first line of the list: the versions of the libraries whose classes it was read from."""
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return "# " + ", ".join(found)


def check(recipe: Recipe, overrides: Iterable[Override]) -> None:
    """Refuse a path that no class takes, where the list can tell.

    Raises:
        UserError: with the nearest path that exists.
    """
    first, *known = FILE.read_text().splitlines()
    if not set(recipe.build.__code__.co_names) <= _PLAIN or first != versions():
        return
    for override in overrides:
        path = override.path
        inside = any(path.startswith((f"{one}.", f"{one}[")) for one in known)  # of a value, such as a dict
        if path in known or inside or any(one.startswith(f"{path}.") for one in known):
            continue
        parent = path.rpartition(".")[0]
        siblings = [one for one in known if one.rpartition(".")[0] == parent]
        near = difflib.get_close_matches(path, siblings, n=3, cutoff=0.6) or difflib.get_close_matches(path, known, n=1)
        raise unknown_path(override, path, near)
