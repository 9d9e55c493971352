"""The pages of the documentation, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")
MEASUREMENTS = sorted(page for page in (ROOT / "docs/measurements").glob("*.md") if page.name != "README.md")


def name(page: Path) -> str:
    """The page's path in this project."""
    return str(page.relative_to(ROOT))


def commands(program: str) -> list[tuple[str, str]]:
    """(page, arguments) of every command that starts with `program`, as it is typed; comments and pipes cut off.

    A line that stands for many (`...`) is left out.
    """
    found = set()
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for match in re.finditer(rf"{re.escape(program)}([^`\n#|]*)", text):
            arguments = re.split("  | > |，|。", match[1])[0].strip().rstrip('.;,:)"')
            if "..." not in arguments:
                found.add((name(page), arguments))
    return sorted(found)


def prose(page: Path) -> str:
    """The page without code blocks, inline code and headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"^(    .*|#.*)$", "", text, flags=re.M)
    return re.sub(r"`[^`]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The names under which GitHub makes the page's headings reachable."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one)) for one in headings)
    return {one.strip().lower().replace(" ", "-") for one in plain}
