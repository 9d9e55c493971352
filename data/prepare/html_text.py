"""The text of an HTML page: without markup, scripts and styles, one line per block of the page."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_UNSEEN = ("script", "style", "template", "noscript")
_INLINE: tuple[str, ...] = (
    "a",
    "abbr",
    "b",
    "bdi",
    "bdo",
    "cite",
    "code",
    "data",
    "dfn",
    "em",
    "font",
    "i",
    "kbd",
    "label",
    "mark",
)
_INLINE += ("q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr")


class _TextParser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.unseen = 0
        self.preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.unseen += tag in _UNSEEN
        self.preformatted += tag == "pre"
        if tag not in _INLINE:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.unseen = max(0, self.unseen - (tag in _UNSEEN))
        self.preformatted = max(0, self.preformatted - (tag == "pre"))
        if tag not in _INLINE:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.unseen:
            self.parts.append(data if self.preformatted else re.sub(r"\s+", " ", data))


def extract_text(html: str) -> str:
    """The text that a reader of the page sees; at most one empty line between two blocks."""
    parser = _TextParser()
    parser.feed(html)
    parser.close()
    lines = "".join(parser.parts).split("\n")
    text = "\n".join(line.rstrip() if line.startswith("  ") else line.strip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
