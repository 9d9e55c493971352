"""Recipes by name. `@recipe(...)` over a function registers it; nothing heavy is imported before a recipe is built."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.commands import launch_command
from common.errors import UserError, unknown_name
from recipes import memory
from recipes.plan import Plan

if TYPE_CHECKING:
    import nemo_run as run

RECIPE_FILES = ("recipes.qwen25",)  # imported for their recipes; a file anywhere else is named as FILE.py:function
_registered: dict[str, Recipe] = {}


class Recipe:
    """A function that builds a complete `run.Partial` from its plan; called without arguments it returns that Partial.

    Args:
        plan: the numbers that the recipe declares.
        build: makes NeMo-Run's configuration from a plan (the declared one, or one that overrides have changed).
    """

    def __init__(self, plan: Plan, build: Callable[[Plan], run.Partial]) -> None:
        self.plan, self.build = plan, build
        self.__name__, self.__doc__ = build.__name__, build.__doc__

    def __call__(self) -> run.Partial:
        return self.build(self.plan)

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        return (self.__doc__ or "").strip().split("\n")[0]


def recipe(base: Recipe | None = None, /, **numbers: Any) -> Callable[[Callable[[Plan], run.Partial]], Recipe]:
    """Decorator over a function `name(plan) -> run.Partial`: registers it as the recipe of that name.

    Args:
        base: a recipe whose numbers are taken where `numbers` gives no others.
        numbers: fields of `recipes.plan.Plan`. With `memory_profile` and without a micro batch, the batch is the one
            that the profile has room for on a GPU of 80 GiB; the launcher fits it to the GPU that is found.
    """
    plan = base.plan.changed(**numbers) if base is not None else Plan(**numbers)
    if plan.memory_profile is not None and "micro_batch_size" not in numbers:
        plan = memory.fit(plan, plan.memory_profile, memory.ASSUMED_GPU_GIB)[0]

    def register(build: Callable[[Plan], run.Partial]) -> Recipe:
        made = Recipe(plan, build)
        _registered[made.__name__] = made
        return made

    return register


def recipes() -> dict[str, Recipe]:
    """Every registered recipe by name, in the order of their files."""
    for file in RECIPE_FILES:
        importlib.import_module(file)
    return dict(_registered)


def resolve(name: str) -> Recipe:
    """The recipe called `name`, or the function of `FILE.py:function`.

    Raises:
        UserError: the name is not registered (the nearest ones are offered), or the file has no such recipe.
    """
    path, colon, function = name.rpartition(":")
    if colon:
        return _from_file(Path(path), function)
    if name not in recipes():
        raise unknown_name("recipe", name, recipes(), launch_command("recipes"), ", or FILE.py:function", "--recipe {}")
    return recipes()[name]


def _from_file(path: Path, function: str) -> Recipe:
    """Execute a recipe file outside this package; the user named it, as a script is named on a command line."""
    if not path.is_file():
        do = "check the path"
        raise UserError(f"no recipe file {path}", expected="FILE.py:function", found="no such file", do=do)
    spec = importlib.util.spec_from_file_location(f"recipe_file_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    listed = dict(_registered)
    spec.loader.exec_module(module)
    _registered.clear()  # a file of the user's own adds nothing to the list of this package's recipes
    _registered.update(listed)
    own = module.__name__  # what the file imports from elsewhere has its name there
    found = {n: v for n, v in vars(module).items() if isinstance(v, Recipe) and v.build.__module__ == own}
    if function not in found:
        raise UserError(
            f"{path} has no recipe {function!r}",
            expected="one of " + ", ".join(found) if found else "a function with @recipe(...) over it",
            found=repr(function),
            do=f"--recipe {path}:{next(iter(found))}" if found else "put @recipe(...) over it (docs/my-own-recipe.md)",
        )
    return found[function]
