"""Shard files to the final .bin and .idx of a split, byte-identical to those of Megatron's IndexedDatasetBuilder.

Shards are appended in the order of the sources, and their .bin files are deleted once their bytes are safely in the
final .bin, so that the disk holds the corpus once. The .docs files stay: they say how much of the final .bin is
complete when an interrupted merge continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from common.files import file_sha256
from data.block_hashes import hash_blocks
from data.indexed import DTYPE_CODES, HEADER, MAGIC
from data.manifest import SplitFacts
from data.prepare.shard import DOC_RECORD, shard_path

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Keep = list[npt.NDArray[np.bool_]]

SYNC_BYTES = 1 << 28  # appended before the file is synced and the shards' files are deleted
COPY_BYTES = 1 << 24
DEDUP_RECORDS = 1 << 23  # hashes compared at once


def merge_split(work: Path, out: Path, split: str, num_shards: int, dedup: bool, dtype: str) -> SplitFacts:
    """Write `out/split.bin` and `out/split.idx` from the files of all shards.

    Raises:
        OSError: the disk is full; the merge can be continued.
    """
    import numpy as np

    docs = [read_docs(work, index, split) for index in range(num_shards)]
    keep = first_occurrences(docs) if dedup else [np.ones(len(shard), dtype=bool) for shard in docs]
    lengths = [shard["tokens"][mask] for shard, mask in zip(docs, keep, strict=True)]
    itemsize = np.dtype(dtype).itemsize
    _merge_bin(work, out / f"{split}.bin", split, docs, keep, itemsize)
    _write_idx(out / f"{split}.idx", lengths, dtype)
    kept = sum(map(len, lengths))
    return SplitFacts(
        documents=kept,
        tokens=sum(int(part.sum(dtype=np.int64)) for part in lengths),
        text_bytes=sum(int(shard["bytes"][mask].sum()) for shard, mask in zip(docs, keep, strict=True)),
        duplicates_dropped=sum(map(len, docs)) - kept,
        bin_sha256=file_sha256(out / f"{split}.bin"),
        idx_sha256=file_sha256(out / f"{split}.idx"),
        bin_blocks=hash_blocks(out / f"{split}.bin"),
    )


def first_occurrences(docs: list[Any]) -> Keep:
    """Mark, in each shard's records, the documents that no earlier document equals: record[n] -> bool[n].

    Compares the hashes in passes of about `DEDUP_RECORDS` records, so that memory does not grow with their number.
    """
    import numpy as np

    keep = [np.ones(len(shard), dtype=bool) for shard in docs]
    passes = sum(map(len, docs)) // DEDUP_RECORDS + 1
    for number in range(passes):
        where = [np.flatnonzero(shard["low"] % np.uint64(passes) == number) for shard in docs]
        high = np.concatenate([shard["high"][rows] for shard, rows in zip(docs, where, strict=True)])
        low = np.concatenate([shard["low"][rows] for shard, rows in zip(docs, where, strict=True)])
        order = np.lexsort((low, high))
        again = np.zeros(len(order), dtype=bool)
        again[order[1:]] = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
        start = 0
        for mask, rows in zip(keep, where, strict=True):
            mask[rows] = ~again[start : start + len(rows)]
            start += len(rows)
    return keep


def read_docs(work: Path, index: int, split: str) -> Any:
    """The documents of one shard in a split: DOC_RECORD[documents]."""
    import numpy as np

    path = shard_path(work, index, split, "docs")
    if path.stat().st_size == 0:
        return np.empty(0, dtype=DOC_RECORD)
    return np.memmap(path, dtype=np.dtype(DOC_RECORD), mode="r")


def _merge_bin(work: Path, target: Path, split: str, docs: list[Any], keep: Keep, itemsize: int) -> None:
    """Append the shards whose .bin files still exist after those that an interrupted merge has appended."""
    import numpy as np

    with target.open("r+b" if target.exists() else "w+b") as file:
        offset = pending = 0
        done: list[Path] = []
        for index, (shard, mask) in enumerate(zip(docs, keep, strict=True)):
            path = shard_path(work, index, split, "bin")
            size = int(shard["tokens"][mask].sum(dtype=np.int64)) * itemsize
            if path.exists():
                file.seek(offset)
                _append(file, path, shard["tokens"], mask, itemsize)
                done.append(path)
                pending += size
            elif target.stat().st_size < offset + size:
                raise OSError(f"{path} is missing and {target.name} does not contain it: start again with --overwrite")
            offset += size
            if pending >= SYNC_BYTES:
                _sync_and_delete(file, done)
                pending = 0
        file.truncate(offset)
        _sync_and_delete(file, done)


def _sync_and_delete(file: BinaryIO, appended: list[Path]) -> None:
    """Sync the appended bytes to the disk, and only then delete the shard files that they came from."""
    file.flush()
    os.fsync(file.fileno())
    for path in appended:
        path.unlink()
    appended.clear()


def _append(file: BinaryIO, path: Path, tokens: Any, mask: Any, itemsize: int) -> None:
    with path.open("rb") as source:
        for start, end in _kept_ranges(tokens, mask, itemsize):
            source.seek(start)
            while start < end:
                block = source.read(min(COPY_BYTES, end - start))
                if not block:
                    raise OSError(f"{path} is shorter than its .docs file says")
                file.write(block)
                start += len(block)


def _kept_ranges(tokens: Any, mask: Any, itemsize: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a shard file that are kept, adjacent ones joined."""
    import numpy as np

    ends = np.cumsum(tokens, dtype=np.int64) * itemsize
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    for first, last in edges.reshape(-1, 2).tolist():
        yield (int(ends[first - 1]) if first else 0), int(ends[last - 1])


def _write_idx(path: Path, lengths: list[Any], dtype: str) -> None:
    """Write the index: header, lengths, byte offsets, document table (one document per sequence)."""
    import numpy as np

    count = sum(map(len, lengths))
    itemsize = np.dtype(dtype).itemsize
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, DTYPE_CODES[dtype], count, count + 1))
        for part in lengths:
            file.write(part.astype("<i4").tobytes())
        offset = 0
        for part in lengths:
            ends = np.cumsum(part, dtype=np.int64) * itemsize
            file.write((offset + ends - part * np.int64(itemsize)).astype("<i8").tobytes())
            offset += int(ends[-1]) if len(part) else 0
        for start in range(0, count + 1, COPY_BYTES):
            file.write(np.arange(start, min(start + COPY_BYTES, count + 1), dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())


def write_idx(path: Path, lengths: Any, pointers: Any, dtype: str) -> None:
    """Write an index of documents at any places of a .bin: lengths int32[n] in ids, pointers int64[n] in bytes."""
    import numpy as np

    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, DTYPE_CODES[dtype], len(lengths), len(lengths) + 1))
        file.write(np.asarray(lengths, dtype="<i4").tobytes())
        file.write(np.asarray(pointers, dtype="<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
