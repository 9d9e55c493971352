"""Facts about a Megatron .bin/.idx pair, read with the standard library alone.

Layout of an .idx file, little endian: 9 bytes magic, u64 version, u8 dtype code, u64 sequences, u64 entries
of the document table, then int32 lengths[sequences], int64 byte offsets[sequences], int64
documents[entries]. The reader looks at the header, the last length and the last offset only: its time does
not grow with the corpus.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.errors import PreflightError, ProjectError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
ITEM_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


@dataclass(frozen=True)
class IndexFacts:
    """What the index says, beside what lies on the disk.

    Args:
        dtype_code: Megatron's code of the id type (4 int32, 8 uint16).
        itemsize: bytes of one id.
        num_sequences: sequences in the .bin.
        num_documents: documents; equal to num_sequences in a corpus made by `data prepare`.
        num_tokens: ids in the .bin, by the index.
        bin_bytes_expected: size of the .bin, by the index.
        bin_bytes_found: size of the .bin on the disk; -1 when there is none.
    """

    dtype_code: int
    itemsize: int
    num_sequences: int
    num_documents: int
    num_tokens: int
    bin_bytes_expected: int
    bin_bytes_found: int


def read_index(prefix: str | Path) -> IndexFacts:
    """Read the facts of the pair `prefix`.bin and `prefix`.idx.

    Raises:
        PreflightError: no .idx, or one that is not an index or is cut short.
    """
    idx = Path(f"{prefix}.idx")
    try:
        with idx.open("rb") as file:
            return _read(file, idx, Path(f"{prefix}.bin"))
    except FileNotFoundError:
        raise _finding(f"{idx} is missing", "an index beside the .bin", "no such file", idx) from None
    except OSError as error:
        raise _finding(f"{idx} cannot be read", "a readable index", str(error), idx) from None


def check_prefix(prefix: str | Path) -> list[ProjectError]:
    """Look for every fault of a .bin/.idx pair that can be seen without reading the data.

    Returns:
        Findings, none when the pair is fine: an extension in the path, a missing file, a wrong or cut
        index, a .bin whose size is not the index's, no documents.
    """
    text = str(prefix)
    if text.endswith((".bin", ".idx")):
        return [
            PreflightError(
                f"{text}: a prefix is wanted, without extension",
                expected="the path of the pair without .bin or .idx",
                found=text,
                do=f"write {text[:-4]}",
            )
        ]
    findings: list[ProjectError] = []
    bin_path = Path(f"{text}.bin")
    if not bin_path.is_file():
        findings.append(_finding(f"{bin_path} is missing", "token ids beside the .idx", "no such file", bin_path))
    try:
        facts = read_index(prefix)
    except ProjectError as error:
        return [*findings, error]
    return findings + _check_facts(facts, bin_path)


def _check_facts(facts: IndexFacts, bin_path: Path) -> list[ProjectError]:
    if facts.num_documents < 1 or facts.num_sequences < 1 or facts.num_tokens < 1:
        return [_finding(f"{bin_path} holds no documents", "at least one document", "0 documents", bin_path)]
    if facts.bin_bytes_found in (-1, facts.bin_bytes_expected):
        return []
    short = facts.bin_bytes_found < facts.bin_bytes_expected
    what = "is cut short" if short else "is longer than its index says: the .idx belongs to another file"
    expected, found = f"{facts.bin_bytes_expected} bytes", f"{facts.bin_bytes_found} bytes"
    return [_finding(f"{bin_path} {what}", expected, found, bin_path)]


def _read(file: BinaryIO, idx: Path, bin_path: Path) -> IndexFacts:
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        raise _finding(f"{idx} is not an index", f"first bytes {MAGIC!r}", repr(header[:9]), idx)
    if len(header) < HEADER.size:
        raise _cut(idx, HEADER.size, size)
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != 1 or code not in ITEM_SIZES:
        found = f"version {version}, dtype code {code}"
        raise _finding(f"{idx} is not an index", "version 1 and a known dtype code", found, idx)
    wanted = HEADER.size + 12 * sequences + 8 * entries
    # a multimodal index adds one byte a sequence
    if size not in (wanted, wanted + sequences):
        raise _cut(idx, wanted, size)
    tokens_bytes = _last_end(file, sequences, ITEM_SIZES[code])
    return IndexFacts(
        dtype_code=code,
        itemsize=ITEM_SIZES[code],
        num_sequences=sequences,
        num_documents=max(entries - 1, 0),
        num_tokens=tokens_bytes // ITEM_SIZES[code],
        bin_bytes_expected=tokens_bytes,
        bin_bytes_found=bin_path.stat().st_size if bin_path.is_file() else -1,
    )


def _last_end(file: BinaryIO, sequences: int, itemsize: int) -> int:
    """Bytes of the .bin: where the last sequence ends."""
    if not sequences:
        return 0
    file.seek(HEADER.size + 4 * (sequences - 1))
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
    (offset,) = struct.unpack("<q", file.read(8))
    return int(offset + length * itemsize)


def _cut(idx: Path, wanted: int, size: int) -> PreflightError:
    what = "is cut short" if size < wanted else "is longer than its header says"
    return _finding(f"{idx} {what}", f"{wanted} bytes by its header", f"{size} bytes", idx)


def _finding(what: str, expected: str, found: str, path: Path) -> PreflightError:
    prepare = f"python launch.py data prepare INPUT --output {path.parent} --tokenizer NAME"
    do = f"check the path, copy the pair again, or prepare it: {prepare}"
    return PreflightError(what, expected=expected, found=found, do=do)
