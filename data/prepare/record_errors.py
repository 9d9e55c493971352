"""Errors for records and files that cannot be used, with the place where they are."""

from __future__ import annotations

import difflib
from pathlib import Path

from common.errors import UserError
from data.prepare.input_files import BUFFER_BYTES, Piece, Source, open_stored

SKIP_HINT = "correct the line, or leave such lines out and count them with --on-error skip"


class BadRecordError(UserError):
    """One record that cannot be used; under `on_error="skip"` it is counted and left out.

    `line`: the line, with replacement characters where it is not UTF-8.
    """

    line = ""


class UnlocatedRecordError(Exception):
    """What is wrong with a record, raised where its file and line are not known; the caller adds them."""

    def __init__(self, what: str, found: str, do: str = SKIP_HINT) -> None:
        super().__init__(what)
        self.what, self.found, self.do = what, found, do


def bad_line_error(
    piece: Piece, number: int, what: str, expected: str, found: str, do: str = SKIP_HINT
) -> BadRecordError:
    """The error for line `number` of the piece (1-based)."""
    place = f"{piece.source.path}:{_count_lines_before(piece) + number}"
    return BadRecordError(f"{place}: {what}", expected=expected, found=found.strip()[:200], do=do)


def encoding_error(
    piece: Piece, number: int, error: UnicodeDecodeError, file_offset: int | None = None
) -> BadRecordError:
    """The error for bytes of line `number` of the piece that are not UTF-8.

    Args:
        file_offset: where the byte is in the file, if that is known; else its place in the line is given.
    """
    byte = error.object[error.start]
    where = f"byte {error.start} of the line" if file_offset is None else f"byte {file_offset} of the file"
    return BadRecordError(
        f"{piece.source.path}:{_count_lines_before(piece) + number}: not UTF-8 ({where})",
        expected="UTF-8 text",
        found=f"byte 0x{byte:02x} ({error.reason})",
        do="convert the file (iconv -f LATIN1 -t UTF-8), or leave such records out with --on-error skip",
    )


def _count_lines_before(piece: Piece) -> int:
    """Lines of the file before the piece; counted only when an error needs the number."""
    count, left = 0, piece.start
    with open_stored(piece.source) as file:
        while left > 0 and (block := file.read(min(left, BUFFER_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
    return count


def describe_fields(names: list[str], field: str) -> str:
    """The fields that exist, and the one nearest to the name asked for."""
    near = difflib.get_close_matches(field, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"fields {', '.join(map(repr, names)) or 'none'}{hint}"


def missing_column_error(source: Source, names: list[str], field: str) -> UserError:
    """The error for a table without the text column."""
    return UserError(
        f"{source.path}: no column {field!r}",
        expected=f"a column {field!r} with the text",
        found=describe_fields(names, field),
        do="name the column with --field",
    )


def repeated_column_error(source: Source, names: list[str], field: str) -> UserError:
    """The error for a table with several columns of the name asked for."""
    return UserError(
        f"{source.path}: {names.count(field)} columns {field!r}",
        expected=f"one column {field!r} with the text",
        found=f"columns {', '.join(map(repr, names))}",
        do="rename or remove all but one of them",
    )


def header_error(problem: BadRecordError) -> UserError:
    """The error for a CSV header with this problem: a header cannot be skipped."""
    do = "correct the first line, which names the columns, or convert the file to UTF-8 (iconv -f LATIN1 -t UTF-8)"
    return UserError(problem.what, expected=problem.expected, found=problem.found, do=do)


def open_quote_error(source: Source, first: int, last: int, found: str) -> UserError:
    """The error for a CSV record whose quoting is broken and that has taken in the lines after it.

    Where such a record ends cannot be known, so that it is never skipped.

    Args:
        first, last: first and last line of the record as it was read (1-based).
    """
    return UserError(
        f"{source.path}:{first}: a quote that opens in this record is not closed as it should be",
        expected='each quoted field closed by a quote, a quote inside it doubled (""), '
        "and as many columns as the header has",
        found=f"lines {first} to {last} read as one record: {found}",
        do=f"correct line {first}; also with --on-error skip, which would lose the lines that follow it",
    )


def line_ends_error(source: Source, number: int) -> UserError:
    """The error for lines that end in a carriage return only."""
    name = Path(source.path).name
    unpacked = name if source.compression is None else Path(name).stem
    return UserError(
        f"{source.path}:{number}: the lines end in carriage returns only (\\r, as on old Macs)",
        expected="lines that end in \\n or \\r\\n",
        found="\\r without \\n inside a line",
        do=f"tr '\\r' '\\n' < {unpacked} > converted-{unpacked}, and prepare that"
        + (", unpacked first" if source.compression else ""),
    )


def decompression_error(source: Source, found: str) -> UserError:
    """The error for a compressed file that is cut short, or not compressed as its name says."""
    return UserError(
        f"{source.path} cannot be decompressed",
        expected=f"a whole {source.compression} file",
        found=found,
        do="copy or download the file again",
    )


def lost_hub_error(source: Source, error: OSError) -> UserError:
    """The error for a file of the hub that could no longer be read, after the retries of its library."""
    return UserError(
        f"{source.path} can no longer be read",
        expected="an answer of the hub",
        found=f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200],
        do="run the same command again: it continues with the shards that are not done",
    )
