"""The input files of a corpus, the ranges in which they are read, and how to open them."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from common.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BUFFER_BYTES = 1 << 20  # read at once from an input file


@dataclass(frozen=True)
class Source:
    """One input file.

    Args:
        path: absolute path.
        format: "txt", "html", "jsonl", "csv", "parquet" or "arrow".
        compression: "gzip", "zstd" or None.
        bytes: size on the disk.
        mtime_ns: time of the last change, in nanoseconds.
    """

    path: str
    format: str
    compression: str | None
    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Piece:
    """A range of one source: bytes of a plain file (end exclusive), row groups of a parquet file.

    Args:
        source: the file.
        start: first byte or row group.
        end: one past the last; -1 means to the end of the file.
        bytes: its part of the source's size, for the progress bar.
    """

    source: Source
    start: int
    end: int
    bytes: int


Shard = tuple[Piece, ...]


def open_bytes(source: Source) -> BinaryIO:
    """Open a source for reading its uncompressed bytes."""
    if source.compression == "gzip":
        return cast(BinaryIO, io.BufferedReader(gzip.open(source.path, "rb"), BUFFER_BYTES))
    if source.compression == "zstd":
        import pyarrow

        # pyarrow and not zstandard, which ends a file that is cut short without an error
        stream = pyarrow.input_stream(source.path, compression="zstd")
        return cast(BinaryIO, io.BufferedReader(stream, BUFFER_BYTES))
    return Path(source.path).open("rb", buffering=BUFFER_BYTES)


def open_parquet(source: Source) -> ParquetFile:
    """Open a parquet file.

    Raises:
        UserError: it is not a parquet file, or it is cut short.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(source.path)
    except pyarrow.ArrowInvalid as error:
        found = str(error).splitlines()[0]
        raise UserError(
            f"{source.path} is not a readable parquet file",
            expected="a whole parquet file",
            found=found,
            do="copy or download it again",
        ) from None
