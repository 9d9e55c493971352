"""The input files of a corpus, the ranges in which they are read, and how to open them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from common.errors import UserError
from common.files import file_sha256

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

BUFFER_BYTES = 1 << 20  # read at once from an input file
HUB = "hf://datasets/"  # then OWNER/NAME@COMMIT/PATH


@dataclass(frozen=True)
class Source:
    """One input file.

    Args:
        path: absolute path, or hf://datasets/OWNER/NAME@COMMIT/PATH.
        format: "txt", "html", "jsonl", "csv", "parquet" or "arrow".
        compression: "gzip", "zstd" or None.
        bytes: size on the disk.
        mtime_ns: time of the last change, in nanoseconds; 0 for a file of the hub, whose path names a commit.
        sha256: of its bytes, where the hub has recorded it.
    """

    path: str
    format: str
    compression: str | None
    bytes: int
    mtime_ns: int
    sha256: str = ""

    @property
    def on_hub(self) -> bool:
        return self.path.startswith(HUB)


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


def open_stored(source: Source, hub_bytes: int = 5 << 20) -> BinaryIO:
    """Open a source for reading its bytes as they are stored, here or, `hub_bytes` at a time, on the hub."""
    if not source.on_hub:
        return Path(source.path).open("rb", buffering=BUFFER_BYTES)
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(endpoint=os.environ.get("HF_ENDPOINT"))
    return cast(BinaryIO, hub.open(source.path, "rb", block_size=hub_bytes))


def hash_stored(source: Source) -> str:
    """SHA-256 of the stored bytes in hexadecimal digits; where the hub has recorded it, without reading them."""
    if source.sha256 or not source.on_hub:
        return source.sha256 or file_sha256(Path(source.path))
    digest = hashlib.sha256()
    with open_stored(source) as file:
        while block := file.read(BUFFER_BYTES):
            digest.update(block)
    return digest.hexdigest()


def open_bytes(source: Source) -> BinaryIO:
    """Open a source for reading its uncompressed bytes."""
    if source.compression == "gzip":
        return cast(BinaryIO, io.BufferedReader(gzip.open(open_stored(source), "rb"), BUFFER_BYTES))
    if source.compression == "zstd":
        import pyarrow

        # pyarrow and not zstandard, which ends a file that is cut short without an error
        stored = open_stored(source) if source.on_hub else source.path
        stream = pyarrow.input_stream(stored, compression="zstd")
        return cast(BinaryIO, io.BufferedReader(stream, BUFFER_BYTES))
    return open_stored(source)


def open_parquet(source: Source) -> ParquetFile:
    """Open a parquet file.

    Raises:
        UserError: it is not a parquet file, or it is cut short.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(open_stored(source) if source.on_hub else source.path)
    except pyarrow.ArrowInvalid as error:
        found = str(error).splitlines()[0]
        raise UserError(
            f"{source.path} is not a readable parquet file",
            expected="a whole parquet file",
            found=found,
            do="copy or download it again",
        ) from None
