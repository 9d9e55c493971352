"""Elements of a page. Text is escaped unless it is markup made here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Markup; any other text given to `el` is escaped."""

    __slots__ = ()


def el(tag: str, *children: object, **attributes: str | None) -> Html:
    """`<tag ...>children</tag>`; `class_` is class, None leaves an attribute or a child out, lists are flattened."""
    names = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{names}>{''.join(_flat(children))}</{tag}>")


def _flat(children: Iterable[object]) -> Iterable[str]:
    for child in children:
        if isinstance(child, Html):
            yield child
        elif isinstance(child, (list, tuple)):
            yield from _flat(child)
        elif child is not None:
            yield html.escape(str(child))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], class_: str = "") -> Html:
    """A table whose first column names the row."""
    top = el("thead", el("tr", [el("th", cell, scope="col") for cell in head])) if head else None
    body = [el("tr", el("th", row[0], scope="row"), [_cell(cell) for cell in row[1:]]) for row in rows]
    return el("div", el("table", top, el("tbody", body), class_=class_ or None), class_="wide")


def _cell(cell: object) -> Html:
    return cell if isinstance(cell, Html) and cell.startswith("<td") else el("td", cell)


def section(title: str, *children: object, about: object = "") -> Html:
    """A titled part of the page; nothing at all without children."""
    given = [child for child in children if child]
    if not given:
        return Html("")
    return el("section", el("h2", title), el("p", about, class_="about") if about else None, given)


def figure(svg: str | None, caption: str) -> Html | None:
    """An inlined figure with what it shows under it."""
    return el("figure", el("div", Html(svg), class_="wide"), el("figcaption", caption)) if svg else None


def page(title: str, style: str, *body: object) -> str:
    """The whole document."""
    head = el(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        el("title", title),
        Html(f"<style>{style}</style>"),
    )
    return "<!doctype html>\n" + el("html", head, el("body", el("main", body)), lang="en") + "\n"
