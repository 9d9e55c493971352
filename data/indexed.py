"""Facts about a Megatron .bin/.idx pair, read with the standard library only.

Layout of an .idx file, little endian: 9 bytes magic, u64 version, u8 dtype code, u64 sequences, u64 entries
of the document table, then int32 lengths[sequences], int64 byte offsets[sequences], int64
documents[entries]. `read_index` reads only the header, the last length and the last offset, so that its time does not
grow with the corpus.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from common.commands import launch_command
from common.errors import PreflightError, ProjectError

CUT_SHORT = "is cut short"  # watch/known_failures.py looks for it
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
DTYPE_CODES = {name: code for code, name in DTYPES.items()}
ITEM_SIZES = {
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}  # bytes


@dataclass(frozen=True)
class IndexFacts:
    """What the index says, and what is on the disk.

    Args:
        dtype: type of the ids, as numpy names it.
        itemsize: bytes of one id.
        num_sequences: sequences in the .bin.
        num_documents: documents; equal to num_sequences in a corpus made by `data prepare`.
        num_tokens: ids in the .bin, by the index.
        bin_bytes_expected: size of the .bin, by the index.
        bin_bytes_found: size of the .bin on the disk; -1 when there is none.
    """

    dtype: str
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
        raise _damage_error(f"{idx} is missing", "an index beside the .bin", "no such file", idx) from None
    except OSError as error:
        raise _damage_error(f"{idx} cannot be read", "a readable index", str(error), idx) from None


def check_prefix(prefix: str | Path) -> list[ProjectError]:
    """Check a .bin/.idx pair for everything that can be seen without reading the data.

    Returns:
        Findings, none when the pair is fine: an extension in the path, a missing file, a wrong or cut
        index, a .bin whose size is not the index's, no documents.
    """
    text = str(prefix)
    if text.endswith((".bin", ".idx")):
        return [
            PreflightError(
                f"{text}: expected a prefix without extension",
                expected="the path of the pair without .bin or .idx",
                found=text,
                do=f"write {text[:-4]}",
            )
        ]
    findings: list[ProjectError] = []
    bin_path = Path(f"{text}.bin")
    if not bin_path.is_file():
        findings.append(_damage_error(f"{bin_path} is missing", "token ids beside the .idx", "no such file", bin_path))
    try:
        facts = read_index(prefix)
    except ProjectError as error:
        return [*findings, error]
    return findings + _check_facts(facts, bin_path)


def _check_facts(facts: IndexFacts, bin_path: Path) -> list[ProjectError]:
    if facts.num_documents < 1 or facts.num_sequences < 1 or facts.num_tokens < 1:
        return [_damage_error(f"{bin_path} holds no documents", "at least one document", "0 documents", bin_path)]
    if facts.bin_bytes_found in (-1, facts.bin_bytes_expected):
        return []
    is_short = facts.bin_bytes_found < facts.bin_bytes_expected
    what = CUT_SHORT if is_short else "is longer than its index says: the .idx belongs to another file"
    expected, found = f"{facts.bin_bytes_expected} bytes", f"{facts.bin_bytes_found} bytes"
    return [_damage_error(f"{bin_path} {what}", expected, found, bin_path)]


def _read(file: BinaryIO, idx: Path, bin_path: Path) -> IndexFacts:
    size = os.fstat(file.fileno()).st_size
    header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC[: len(header)] or not header:
        raise _damage_error(f"{idx} is not an index", f"first bytes {MAGIC!r}", repr(header[:9]), idx)
    if len(header) < HEADER.size:
        raise _size_error(idx, HEADER.size, size)
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != 1 or code not in DTYPES:
        found = f"version {version}, dtype code {code}"
        raise _damage_error(f"{idx} is not an index", "version 1 and a known dtype code", found, idx)
    wanted = HEADER.size + 12 * sequences + 8 * entries
    # a multimodal index adds one byte per sequence
    if size not in (wanted, wanted + sequences):
        raise _size_error(idx, wanted, size)
    dtype, itemsize = DTYPES[code], ITEM_SIZES[DTYPES[code]]
    tokens_bytes = _read_end(file, sequences, itemsize)
    return IndexFacts(
        dtype=dtype,
        itemsize=itemsize,
        num_sequences=sequences,
        num_documents=max(entries - 1, 0),
        num_tokens=tokens_bytes // itemsize,
        bin_bytes_expected=tokens_bytes,
        bin_bytes_found=bin_path.stat().st_size if bin_path.is_file() else -1,
    )


def _read_end(file: BinaryIO, sequences: int, itemsize: int) -> int:
    """Where the last sequence ends in the .bin, in bytes."""
    if not sequences:
        return 0
    file.seek(HEADER.size + 4 * (sequences - 1))
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
    (offset,) = struct.unpack("<q", file.read(8))
    return int(offset + length * itemsize)


def _size_error(idx: Path, wanted: int, size: int) -> PreflightError:
    what = CUT_SHORT if size < wanted else "is longer than its header says"
    return _damage_error(f"{idx} {what}", f"{wanted} bytes by its header", f"{size} bytes", idx)


def _damage_error(what: str, expected: str, found: str, path: Path) -> PreflightError:
    prepare = launch_command("data", "prepare", "INPUT", "--output", str(path.parent), "--tokenizer", "NAME")
    do = f"check the path, copy both files again, or prepare the corpus: {prepare}"
    return PreflightError(what, expected=expected, found=found, do=do)
