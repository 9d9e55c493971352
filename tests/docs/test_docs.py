"""Every command in the README and the docs parses; the dry runs resolve."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def _commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for match in re.finditer(r"python launch\.py ([^`\n#|]+)", text):
            command = re.split("  | > ", match[1])[0].strip().rstrip('.;,)"')
            if "..." not in match[1].replace("TEXT...", ""):
                found.append((page.name, command))
    return sorted(set(found))


@pytest.mark.parametrize(("page", "command"), _commands())
def test_command_parses(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options and arguments are the ones that launch.py has; nothing is run."""
    import typer.main

    import launch

    words = shlex.split(command.replace("TEXT...", "TEXT"))
    if words[0].startswith("-") and words[0] != "--help":
        words = ["train", *words]
    group = typer.main.get_command(launch.app)
    context = group.make_context("launch.py", list(words), resilient_parsing=False)
    name, sub, rest = group.resolve_command(context, [*context._protected_args, *context.args])
    while hasattr(sub, "resolve_command") and rest:
        inner = sub.make_context(name, rest, parent=context)
        name, sub, rest = sub.resolve_command(inner, [*inner._protected_args, *inner.args])
    sub.make_context(name, rest, parent=context)


def test_recipes_named_in_the_docs_exist() -> None:
    from recipes.registry import recipes

    for page in PAGES:
        for name in re.findall(r"\bqwen25_(?:tiny|500m)\w*", page.read_text()):
            assert name in recipes(), f"{page.name}: {name}"


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
