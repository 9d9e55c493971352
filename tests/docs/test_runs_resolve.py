"""Every training command in the README and the docs resolves to a configuration. One NeMo import for all."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.docs.pages import commands

pytestmark = pytest.mark.nemo

OPTIONS = {"--recipe", "--executor", "--env", "--cluster", "--name", "--runs", "--devices", "--nodes"}
OPTIONS |= {
    "--profile",
    "--memory-profile",
    "--tokens",
    "--epochs",
    "--tokens-per-step",
    "--from",
    "--retries",
    "--retry-wait",
}
PLACEHOLDERS = {"NAME", "qwen25_mine", "my_recipes.py:qwen25_mine"}


def _runs() -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for page, arguments in commands("python launch.py "):
        words = shlex.split(arguments)
        if "--recipe" in words and words[words.index("--recipe") + 1] not in PLACEHOLDERS:
            found.setdefault(arguments, page)
    return [(page, arguments) for arguments, page in sorted(found.items())]


@pytest.mark.parametrize(("page", "arguments"), _runs())
def test_run_resolves(page: str, arguments: str) -> None:
    """The overrides exist in what would train, with these types: an unknown path would be an error."""
    from common.quantities import parse_count
    from common.spec import RunSpec
    from recipes.overrides import apply_to_recipe
    from recipes.resolve import resolve

    options, overrides = _split(shlex.split(arguments))
    ranks = {"--devices": "trainer.devices", "--nodes": "trainer.num_nodes"}
    overrides = [f"{path}={options[flag]}" for flag, path in ranks.items() if flag in options] + overrides
    spec: dict[str, Any] = {"recipe": options["--recipe"], "overrides": tuple(overrides)}
    spec |= {"profile": options.get("--profile"), "memory_profile": options.get("--memory-profile")}
    if "--tokens" in options:
        spec["tokens"] = parse_count(options["--tokens"], "--tokens")
    found = resolve(RunSpec(**spec))
    lines = apply_to_recipe(found.recipe.build(found.plan), found.overrides, found.recipe.plan)
    assert len(lines) == len(overrides)


@pytest.mark.parametrize(("page", "arguments"), commands("python launch.py resume "))
def test_changes_on_a_resume_are_of_the_plan(page: str, arguments: str) -> None:
    """The words after the run's name name numbers that a plan has."""
    from recipes import overrides, registry
    from recipes.plan import PATHS

    _, words = _split(shlex.split(arguments))
    changes = overrides.parse(words[1:])
    assert {one.path for one in changes} <= set(PATHS)
    overrides.apply_to_plan(registry.resolve("qwen25_500m_cpt").plan, changes)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options with a value, and overrides."""
    options, overrides = {}, []
    while words:
        word = words.pop(0)
        if word in OPTIONS:
            options[word] = words.pop(0)
        elif not word.startswith("--"):
            overrides.append(word)
    return options, overrides
