"""Documents out of files: one generator per format, each in bounded memory.

Every reader yields the text of one document after the other. A record that cannot be read becomes a `BadRecordError`,
a UserError that names file and line; the caller stops at it or, under `on_error="skip"`, counts it. Errors of a whole
file (not compressed as its name says, no such column) always stop the preparation.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from common.errors import UserError
from data.prepare.html_text import extract_text
from data.prepare.input_files import Piece, Source, open_bytes, open_parquet
from data.prepare.record_errors import (
    SKIP_HINT,
    BadRecordError,
    UnlocatedRecordError,
    bad_line_error,
    decompression_error,
    describe_fields,
    encoding_error,
    header_error,
    line_ends_error,
    missing_column_error,
    open_quote_error,
    repeated_column_error,
)

MAX_DOCUMENT_BYTES = 1 << 29
UTF8_BOM = b"\xef\xbb\xbf"
Line = tuple[int, "str | BadRecordError"]  # with its number, counted from the start of the piece (1-based)


def read_piece(piece: Piece, field: str, txt_unit: str) -> Iterator[str | BadRecordError]:
    """Yield the documents of a piece in order, and a BadRecordError in the place of each unusable one.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    source = piece.source
    if source.format == "parquet":
        yield from _read_parquet(piece, field)
        return
    try:
        with open_bytes(source) as file:
            if piece.start:
                file.seek(piece.start)
            if source.format == "csv":
                yield from _read_csv(source, _decode_lines(piece, file), field)
            elif source.format == "jsonl":
                yield from _read_jsonl(piece, _decode_lines(piece, file), field)
            elif source.format == "html":
                text = _read_text_file(piece, file)
                yield extract_text(text) if isinstance(text, str) else text
            elif txt_unit == "file":
                yield _read_text_file(piece, file)
            elif txt_unit == "paragraph":
                yield from _join_paragraphs(_decode_lines(piece, file))
            else:
                for _, line in _decode_lines(piece, file):
                    yield line if isinstance(line, BadRecordError) else line.rstrip("\r\n")
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        if source.compression is None or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise decompression_error(source, str(error)) from None


def _decode_lines(piece: Piece, file: BinaryIO) -> Iterator[Line]:
    """Lines with their line ends."""
    left = piece.end - piece.start if piece.end >= 0 else None
    for number, raw in enumerate(file, start=1):
        if left is not None:
            if left <= 0:
                return
            left -= len(raw)
        if number == 1 and not piece.start:
            raw = raw.removeprefix(UTF8_BOM)
        if number == 1 and not piece.start and b"\r" in raw.rstrip(b"\r\n") and not raw.endswith(b"\n"):
            raise line_ends_error(piece.source, 1)
        try:
            yield number, raw.decode("utf-8")
        except UnicodeDecodeError as error:
            problem = encoding_error(piece, number, error)
            problem.line = raw.decode("utf-8", "replace")
            yield number, problem


def _read_jsonl(piece: Piece, lines: Iterable[Line], field: str) -> Iterator[str | BadRecordError]:
    for number, line in lines:
        if isinstance(line, BadRecordError):
            yield line
        elif not line.isspace():
            try:
                yield _text_of(_parse_json(line, field), field)
            except json.JSONDecodeError as error:
                what = f"broken JSON ({error.msg} at column {error.colno})"
                yield bad_line_error(piece, number, what, "one JSON object per line", line)
            except RecursionError:
                yield bad_line_error(piece, number, "JSON nested too deeply", "one flat JSON object per line", line)
            except UnlocatedRecordError as error:
                expected = f"a text in the field {field!r}"
                yield bad_line_error(piece, number, error.what, expected, error.found, error.do)


def _parse_json(line: str, field: str) -> Any:
    """The value of a line; a field that it names twice would be one of the two for json.loads."""
    if line.count(f'"{field}"') < 2:
        return json.loads(line)
    outermost: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        outermost[:] = pairs  # the outermost object is the last to be completed
        return dict(pairs)

    value = json.loads(line, object_pairs_hook=keep)
    if isinstance(value, dict) and (count := [name for name, _ in outermost].count(field)) > 1:
        raise UnlocatedRecordError(f"{count} fields {field!r}", line)
    return value


def _text_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise UnlocatedRecordError(f"a JSON {type(record).__name__}, not an object", repr(record))
    if field not in record:
        do = "name the field that holds the text with --field, or leave such lines out with --on-error skip"
        raise UnlocatedRecordError(f"no field {field!r}", describe_fields(list(record), field), do)
    return _check_text(record[field], field)


def _check_text(value: Any, field: str) -> str:
    """The text of a field; null counts as an empty document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UnlocatedRecordError(f"field {field!r} is no text", f"{type(value).__name__} {value!r}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"lone surrogate {value[error.start]!r} at character {error.start}"
        raise UnlocatedRecordError("text that is no valid Unicode", found) from None
    return value


def _read_csv(source: Source, lines: Iterable[Line], field: str) -> Iterator[str | BadRecordError]:
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    undecoded: list[BadRecordError] = []

    def decoded() -> Iterator[str]:
        for _, line in lines:
            if isinstance(line, BadRecordError):
                undecoded.append(line)
                line = line.line  # its quotes and commas count
            yield line

    rows = csv.reader(decoded(), strict=True)
    header: list[str] = []
    while True:
        first = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            undecoded.clear()
            problem = _broken_csv(source, first, rows.line_num, error)
            if not header:
                raise header_error(problem) from None
            yield problem
            continue
        if row is None:
            if not header:
                _find_column(source, header, field)
            return
        if undecoded:
            problem = undecoded[0]
            undecoded.clear()
            if not header:
                raise header_error(problem)
            yield problem
        elif not header:
            header = row
            column = _find_column(source, header, field)
        elif len(row) != len(header) and rows.line_num > first:
            raise open_quote_error(
                source, first, rows.line_num, f"{len(row)} columns, and the header has {len(header)}"
            )
        elif len(row) > column:
            yield row[column]
        elif row:
            what = f"{source.path}:{rows.line_num}: row without the column {field!r}"
            found = f"{len(row)} columns"
            yield BadRecordError(what, expected=f"{len(header)} columns", found=found, do=SKIP_HINT)


def _find_column(source: Source, names: list[str], field: str) -> int:
    if field not in names:
        raise missing_column_error(source, names, field)
    if names.count(field) > 1:
        raise repeated_column_error(source, names, field)
    return names.index(field)


def _broken_csv(source: Source, first: int, last: int, error: csv.Error) -> BadRecordError:
    """The error for a record of one line; one that has taken in other lines is raised."""
    if "new-line character" in str(error):
        raise line_ends_error(source, last) from None
    if last > first:
        raise open_quote_error(source, first, last, str(error)) from None
    what = f"{source.path}:{first}: broken CSV ({error})"
    return BadRecordError(what, expected="a quoted CSV row", found="broken quotes", do=SKIP_HINT)


def _read_text_file(piece: Piece, file: BinaryIO) -> str | BadRecordError:
    """The whole file as one document."""
    raw = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise UserError(
            f"{piece.source.path} is too large for one document",
            expected=f"at most {MAX_DOCUMENT_BYTES >> 20} MiB of text per file with --txt-unit file",
            found=f"{piece.source.bytes / 2**20:.0f} MiB on the disk",
            do="use --txt-unit paragraph or --txt-unit line",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = raw.count(b"\n", 0, error.start) + 1
        return encoding_error(piece, number, error, file_offset=error.start)


def _join_paragraphs(lines: Iterable[Line]) -> Iterator[str | BadRecordError]:
    """Paragraphs, with blank lines between them."""
    paragraph: list[str] = []
    for _, line in lines:
        if isinstance(line, BadRecordError):
            yield line
        elif line.isspace():
            if paragraph:
                yield "".join(paragraph).rstrip("\r\n")
            paragraph = []
        else:
            paragraph.append(line)
    if paragraph:
        yield "".join(paragraph).rstrip("\r\n")


def _read_parquet(piece: Piece, field: str) -> Iterator[str | BadRecordError]:
    path = piece.source.path
    file = open_parquet(path)
    names = file.schema_arrow.names
    _find_column(piece.source, names, field)
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.end))
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[field]):
        for value in batch.column(0).to_pylist():
            row += 1
            try:
                yield _check_text(value, field)
            except UnlocatedRecordError as error:
                what = f"{path}, row {row}: {error.what}"
                yield BadRecordError(what, expected="a column of strings", found=error.found[:200], do=SKIP_HINT)
