"""Unusable records and files, with the place where they are."""

from __future__ import annotations

import difflib
from pathlib import Path

from common.errors import UserError
from data.prepare.input_files import Piece, Source

BLOCK_BYTES = 1 << 20
SKIP_HINT = "mend the line, or leave such lines out and count them with --on-error skip"


class BadRecordError(UserError):
    """One record that cannot be used; under `on_error="skip"` it is counted and left out."""


class RecordError(Exception):
    """A fault of a record that does not know yet where it stands."""

    def __init__(self, what: str, found: str, do: str = SKIP_HINT) -> None:
        super().__init__(what)
        self.what, self.found, self.do = what, found, do


def bad_line(
    source: Source, piece: Piece, number: int, what: str, expected: str, found: str, do: str = SKIP_HINT
) -> BadRecordError:
    """A JSON line that cannot be used."""
    where = f"{source.path}:{_first_line(source, piece) + number}: {what}"
    return BadRecordError(where, expected=expected, found=found.strip()[:200], do=do)


def not_utf8(
    source: Source, piece: Piece, number: int, error: UnicodeDecodeError, offset: int | None = None
) -> BadRecordError:
    """Bytes that are no UTF-8; `offset` counts from the start of the file."""
    byte = error.object[error.start]
    where = f"byte {offset} of the file" if offset is not None else f"byte {error.start} of the line"
    return BadRecordError(
        f"{source.path}:{_first_line(source, piece) + number}: not UTF-8 ({where})",
        expected="UTF-8 text",
        found=f"byte 0x{byte:02x} ({error.reason})",
        do="convert the file (iconv -f LATIN1 -t UTF-8), or leave such records out with --on-error skip",
    )


def _first_line(source: Source, piece: Piece) -> int:
    """Lines of the file before the piece; counted only when an error needs it."""
    count, left = 0, piece.start
    with Path(source.path).open("rb") as file:
        while left > 0 and (block := file.read(min(left, BLOCK_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def known_names(names: list[str], field: str) -> str:
    """The fields that there are, and the nearest to the one asked for."""
    near = difflib.get_close_matches(field, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"fields {', '.join(map(repr, names)) or 'none'}{hint}"


def no_column(source: Source, names: list[str], field: str) -> UserError:
    """A table without the text column."""
    return UserError(
        f"{source.path}: no column {field!r}",
        expected=f"a column {field!r} with the text",
        found=known_names(names, field),
        do="name the column with --field",
    )


def broken_file(source: Source, found: str) -> UserError:
    """A compressed file that is cut or no such file."""
    return UserError(
        f"{source.path} cannot be decompressed",
        expected=f"a whole {source.compression} file",
        found=found,
        do="copy or download the file again",
    )
