"""Documents out of files: one generator per format, each in bounded memory.

Every reader yields the text of one document after the other. What it cannot read becomes a `BadRecordError`, a
UserError that names file and line; the caller stops at it or, under `on_error="skip"`, counts it. Faults of
a whole file (not compressed as its name says, no such column) always stop.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from common.errors import UserError
from data.prepare.input_files import Piece, Source, open_bytes, open_parquet
from data.prepare.record_errors import (
    SKIP_HINT,
    BadRecordError,
    RecordError,
    bad_line,
    broken_file,
    known_names,
    no_column,
    not_utf8,
)

MAX_DOCUMENT_BYTES = 1 << 29


def read_piece(piece: Piece, field: str, txt_unit: str) -> Iterator[str | BadRecordError]:
    """Yield the documents of a piece in order, and a BadRecordError in the place of each unusable one.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    source = piece.source
    if source.format == "parquet":
        yield from _parquet(source, piece, field)
        return
    try:
        with open_bytes(source) as file:
            file.seek(piece.start) if piece.start else None
            if source.format == "txt" and txt_unit != "line":
                yield from _txt(source, piece, file, txt_unit)
                return
            lines = _lines(source, piece, file)
            if source.format == "csv":
                yield from _csv(source, lines, field)
            elif source.format == "jsonl":
                yield from _jsonl(source, piece, lines, field)
            else:
                yield from (line if isinstance(line, BadRecordError) else line.rstrip("\r\n") for _, line in lines)
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        if source.compression is None or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise broken_file(source, str(error)) from None


def _lines(source: Source, piece: Piece, file: BinaryIO) -> Iterator[tuple[int, str | BadRecordError]]:
    """Lines with their line ends, decoded, with their number counted from the start of the piece (1-based)."""
    left = piece.end - piece.start if piece.end >= 0 else None
    for number, raw in enumerate(file, start=1):
        if left is not None:
            if left <= 0:
                return
            left -= len(raw)
        if number == 1 and not piece.start:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        try:
            yield number, raw.decode("utf-8")
        except UnicodeDecodeError as error:
            yield number, not_utf8(source, piece, number, error)


def _jsonl(
    source: Source, piece: Piece, lines: Iterable[tuple[int, str | BadRecordError]], field: str
) -> Iterator[str | BadRecordError]:
    for number, line in lines:
        if isinstance(line, BadRecordError):
            yield line
        elif not line.isspace():
            try:
                yield _text_of(json.loads(line), field)
            except json.JSONDecodeError as error:
                fault = f"{error.msg} at column {error.colno}"
                yield bad_line(source, piece, number, f"broken JSON ({fault})", "one JSON object a line", line)
            except RecursionError:
                yield bad_line(source, piece, number, "JSON nested too deeply", "one flat JSON object a line", line)
            except RecordError as fault_:
                yield bad_line(
                    source,
                    piece,
                    number,
                    fault_.what,
                    f"a text in the field {field!r}",
                    fault_.found,
                    fault_.do,
                )


def _text_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise RecordError(f"a JSON {type(record).__name__}, not an object", repr(record))
    if field not in record:
        do = "name the field that holds the text with --field, or leave such lines out with --on-error skip"
        raise RecordError(f"no field {field!r}", known_names(list(record), field), do)
    return check_text(record[field], field)


def check_text(value: Any, field: str) -> str:
    """The text of a field; null counts as an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RecordError(f"field {field!r} is no text", f"{type(value).__name__} {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"lone surrogate {value[error.start]!r} at character {error.start}"
        raise RecordError("text that is no valid Unicode", found) from None
    return value


def _csv(
    source: Source, lines: Iterable[tuple[int, str | BadRecordError]], field: str
) -> Iterator[str | BadRecordError]:
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    bad: list[BadRecordError] = []

    def good() -> Iterator[str]:
        for _, line in lines:
            if isinstance(line, BadRecordError):
                bad.append(line)
            else:
                yield line

    rows = csv.reader(good(), strict=True)
    header = next(rows, [])
    if field not in header:
        raise no_column(source, header, field)
    column = header.index(field)
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield BadRecordError(
                f"{source.path}:{rows.line_num}: broken CSV ({error})",
                expected="a quoted CSV row",
                do=SKIP_HINT,
            )
            continue
        yield from bad
        bad.clear()
        if row is None:
            return
        if len(row) > column:
            yield row[column]
        elif row:
            found = f"{len(row)} columns"
            where = f"{source.path}:{rows.line_num}: row without the column {field!r}"
            yield BadRecordError(where, expected=f"{len(header)} columns", found=found, do=SKIP_HINT)


def _txt(source: Source, piece: Piece, file: BinaryIO, txt_unit: str) -> Iterator[str | BadRecordError]:
    if txt_unit == "file":
        raw = file.read(MAX_DOCUMENT_BYTES + 1)
        if len(raw) > MAX_DOCUMENT_BYTES:
            raise UserError(
                f"{source.path} is too large for one document",
                expected=f"at most {MAX_DOCUMENT_BYTES >> 20} MiB of text a file with --txt-unit file",
                found=f"{source.bytes / 2**20:.0f} MiB on the disk",
                do="use --txt-unit paragraph or --txt-unit line",
            )
        try:
            yield raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            yield not_utf8(source, Piece(piece.source, 0, -1, 0), line, error, offset=error.start)
        return
    paragraph: list[str] = []
    for _, text in _lines(source, piece, file):
        if isinstance(text, BadRecordError):
            yield text
        elif text.isspace():
            if paragraph:
                yield "".join(paragraph).rstrip("\r\n")
            paragraph = []
        else:
            paragraph.append(text)
    if paragraph:
        yield "".join(paragraph).rstrip("\r\n")


def _parquet(source: Source, piece: Piece, field: str) -> Iterator[str | BadRecordError]:
    file = open_parquet(source.path)
    names = file.schema_arrow.names
    if field not in names:
        raise no_column(source, names, field)
    groups = list(range(piece.start, piece.end))
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[field]):
        for value in batch.column(0).to_pylist():
            row += 1
            try:
                yield check_text(value, field)
            except RecordError as fault:
                where = f"{source.path}, row {row}: {fault.what}"
                yield BadRecordError(where, expected="a column of strings", found=fault.found[:200], do=SKIP_HINT)
