"""What the README and the docs say can be typed, found and followed; light: nothing imports NeMo."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import GUIDES, MEASUREMENTS, PAGES, ROOT, anchors, commands, name, prose

GLOSSARY = ROOT / "docs/glossary.md"
OWN_TERMS = ["soup", "pilot", "forgetting budget", "token ledger"]
TERMS = ["nats", "rank", "gate", "preflight", "EOD", "TP", "PP", "VP", "DP", "CP", "MFU", "lever", "NVLS", "replay"]


@functools.cache
def _command_line() -> Any:
    """The parser of launch.py, built once: it takes longer than to parse a command."""
    import typer.main

    import launch

    return typer.main.get_command(launch.app)


@pytest.mark.parametrize(("page", "arguments"), commands("python launch.py "))
def test_command_parses(page: str, arguments: str) -> None:
    """Options and arguments are the ones that launch.py has; nothing is run."""
    import typer

    command = _command_line()
    words = shlex.split(arguments)
    context: Any = typer.Context(command)
    if words[0] in [name for option in command.get_params(context) for name in option.opts]:
        return  # an option of the entry itself, such as --help
    if words[0].startswith("-"):
        words = ["train", *words]
    context = command.make_context("launch.py", words)
    while hasattr(command, "resolve_command"):
        word, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(word, rest, parent=context)


@pytest.mark.parametrize(("page", "arguments"), commands("-m bench."))
def test_bench_command_has_its_options(page: str, arguments: str) -> None:
    """The module exists, and it or the parser that the benches share knows every option."""
    module, *words = shlex.split(arguments)
    source = (ROOT / "bench" / f"{module}.py").read_text()
    known = re.findall(r'"(--[a-z0-9-]+)"', source + (ROOT / "bench/throughput.py").read_text())
    assert {word for word in words if word.startswith("--")} <= set(known)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = {page: words.split() for page, words in commands("    make ") + commands("`make ")}
    assert named
    for page, words in named.items():
        assert {word for word in words if "=" not in word} <= targets, page


def test_recipes_named_in_the_docs_exist() -> None:
    from recipes.registry import recipes

    for page in PAGES:
        for one in re.findall(r"\bqwen25_(?:tiny|500m)\w*", page.read_text()):
            assert one in recipes(), f"{name(page)}: {one}"


def test_every_recipe_is_in_the_table_of_the_start_page() -> None:
    from recipes.registry import recipes

    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/start.md").read_text(), flags=re.M)
    assert not set(recipes()) - set(rows)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        other = page.parent / target if target else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), f"{target}#{anchor}"


def test_pages_named_in_the_code_exist() -> None:
    """Errors and comments send people to docs/; a page that is renamed takes them along."""
    found = subprocess.run(
        ["git", "grep", "-noE", r"docs/[A-Za-z0-9_/-]+(\.[a-z]+)?"], cwd=ROOT, capture_output=True, text=True
    )
    lines = [line.split(":", 2) for line in found.stdout.splitlines()]
    assert lines
    for file, number, path in lines:
        if not file.startswith("tests/docs"):
            assert (ROOT / path).exists(), f"{file}:{number}: {path}"


def test_every_page_is_listed() -> None:
    for index, pages in (("docs/README.md", GUIDES), ("docs/measurements/README.md", MEASUREMENTS)):
        listed = (ROOT / index).read_text()
        assert not [name(page) for page in pages if f"({page.name})" not in listed]


@pytest.mark.parametrize("page", MEASUREMENTS, ids=name)
def test_a_measurement_says_how_it_was_made(page: Path) -> None:
    for row in ("date", "hardware", "version", "command"):
        shown = "|^    (python|torchrun) " if row == "command" else ""
        assert re.search(rf"^\| {row}s? \| .+ \|${shown}", page.read_text(), flags=re.M), row
    assert re.search(r"^\| date \| \d{4}-\d{2}-\d{2}", page.read_text(), flags=re.M)


@pytest.mark.parametrize("page", [page for page in GUIDES if page != GLOSSARY], ids=name)
def test_a_term_is_linked_where_it_is_first_used(page: Path) -> None:
    """A term that only this field has leads to the glossary; one of this project, there or to its own page."""
    text = prose(page)
    for term in TERMS + OWN_TERMS:
        words = re.compile(rf"\b{term}s?\b")
        links_and_words = re.finditer(rf"\[(?P<text>[^\[\]]*)\]\((?P<target>[^)]*)\)|{words.pattern}", text)
        first = next((one for one in links_and_words if words.search(one["text"] or one[0])), None)
        if first is not None:
            target = first["target"] or ""
            assert f"glossary.md#{term.lower().replace(' ', '-')}" in target or (term in OWN_TERMS and target), first[0]


def test_the_contributors_page_names_every_folder() -> None:
    """The tour has a row for each package, and the rows stand in the order of the imports."""
    tour = re.findall(r"^\| `(\w+)/`", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert packages <= set(tour)
    contract = re.search(r"layers = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), flags=re.S)
    assert contract
    layers = [re.findall(r"\w+", layer) for layer in re.findall(r'"([^"]+)"', contract[1])]
    order = [min(map(tour.index, layer)) for layer in layers]
    assert order == sorted(order)
