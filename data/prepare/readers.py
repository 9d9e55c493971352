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
from collections.abc import Callable, Iterable, Iterator
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
    lost_hub_error,
    missing_column_error,
    open_quote_error,
    repeated_column_error,
)

MAX_DOCUMENT_BYTES = 1 << 29
UTF8_BOM = b"\xef\xbb\xbf"
ToText = Callable[[Any, str], str]  # of the value of a field, and the field's name
Line = tuple[int, "str | BadRecordError"]  # with its number, counted from the start of the piece (1-based)


def read_piece(
    piece: Piece, field: str, txt_unit: str, to_text: ToText | None = None
) -> Iterator[str | BadRecordError]:
    """Yield the documents of a piece in order, and a BadRecordError in the place of each unusable one.

    Args:
        to_text: makes the text of the value of `field` in a .jsonl or table; default: it is the text.

    Raises:
        UserError: the file as a whole cannot be read.
    """
    try:
        yield from _read_piece(piece, field, txt_unit, to_text or check_text)
    except OSError as error:  # also what requests raises
        if not piece.source.on_hub:
            raise
        raise lost_hub_error(piece.source, error) from None


def _read_piece(piece: Piece, field: str, txt_unit: str, to_text: ToText) -> Iterator[str | BadRecordError]:
    source = piece.source
    if source.format in ("parquet", "arrow"):
        yield from _read_table(piece, field, to_text)
        return
    try:
        with open_bytes(source) as file:
            if piece.start:
                file.seek(piece.start)
            if source.format == "csv":
                yield from _read_csv(source, _decode_lines(piece, file), field)
            elif source.format == "jsonl":
                yield from _read_jsonl(piece, _decode_lines(piece, file), field, to_text)
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
        of_the_file = isinstance(error, EOFError | zlib.error | gzip.BadGzipFile)
        if source.compression is None or (not of_the_file and (source.on_hub or getattr(error, "errno", None))):
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


def _read_jsonl(piece: Piece, lines: Iterable[Line], field: str, to_text: ToText) -> Iterator[str | BadRecordError]:
    for number, line in lines:
        if isinstance(line, BadRecordError):
            yield line
        elif not line.isspace():
            try:
                yield _text_of(_parse_json(line, field), field, to_text)
            except json.JSONDecodeError as error:
                what = f"broken JSON ({error.msg} at column {error.colno})"
                yield bad_line_error(piece, number, what, "one JSON object per line", line)
            except RecursionError:
                yield bad_line_error(piece, number, "JSON nested too deeply", "one flat JSON object per line", line)
            except UnlocatedRecordError as error:
                expected = f"{'a text' if to_text is check_text else 'messages'} in the field {field!r}"
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


def _text_of(record: Any, field: str, to_text: ToText) -> str:
    if not isinstance(record, dict):
        raise UnlocatedRecordError(f"a JSON {type(record).__name__}, not an object", repr(record))
    if field not in record:
        do = "name the field that holds the text with --field, or leave such lines out with --on-error skip"
        raise UnlocatedRecordError(f"no field {field!r}", describe_fields(list(record), field), do)
    return to_text(record[field], field)


def check_text(value: Any, field: str) -> str:
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


def _read_table(piece: Piece, field: str, to_text: ToText) -> Iterator[str | BadRecordError]:
    """The rows of a .parquet file's row groups, or of a whole .arrow file."""
    expected = "a column of strings" if to_text is check_text else "a column of messages"
    read = _read_parquet if piece.source.format == "parquet" else _read_arrow
    for before, batch in read(piece, field):
        for row, value in enumerate(batch.column(field).to_pylist(), start=before + 1):
            try:
                yield to_text(value, field)
            except UnlocatedRecordError as error:
                what = f"{piece.source.path}, row {row}: {error.what}"
                yield BadRecordError(what, expected=expected, found=error.found[:200], do=SKIP_HINT)


def _read_parquet(piece: Piece, field: str) -> Iterator[tuple[int, Any]]:
    """The record batches of a piece, each with the number of the file's rows before it."""
    file = open_parquet(piece.source)
    _find_column(piece.source, file.schema_arrow.names, field)
    row = sum(file.metadata.row_group(group).num_rows for group in range(piece.start))
    groups = list(range(piece.start, piece.end))
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[field]):
        yield row, batch
        row += batch.num_rows


def _read_arrow(piece: Piece, field: str) -> Iterator[tuple[int, Any]]:
    """Record batches of a file that `datasets` has written (the stream format), memory-mapped."""
    import pyarrow

    path, row = piece.source.path, 0
    try:
        with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
            _find_column(piece.source, stream.schema.names, field)
            for batch in stream:
                for start in range(0, batch.num_rows, 1024):
                    yield row + start, batch.slice(start, 1024)
                row += batch.num_rows
    except (pyarrow.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise UserError(
            f"{path} is not a readable arrow file",
            expected="a whole file as datasets' save_to_disk writes it",
            found=str(error).splitlines()[0],
            do="save or copy the data set again",
        ) from None
