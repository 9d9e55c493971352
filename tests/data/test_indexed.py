"""Index facts and corpus manifests, with the standard library only."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from data.indexed import HEADER, MAGIC, check_prefix, read_index
from data.manifest import load_manifest


def write_pair(prefix: Path, lengths: list[int]) -> None:
    """A uint16 pair as Megatron writes it."""
    offsets = [2 * sum(lengths[:number]) for number in range(len(lengths))]
    count = len(lengths)
    body = struct.pack(f"<{count}i", *lengths) + struct.pack(f"<{count}q", *offsets)
    table = struct.pack(f"<{count + 1}q", *range(count + 1))
    Path(f"{prefix}.idx").write_bytes(HEADER.pack(MAGIC, 1, 8, count, count + 1) + body + table)
    Path(f"{prefix}.bin").write_bytes(bytes(2 * sum(lengths)))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def test_a_whole_pair_has_its_facts_and_no_findings(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [3, 4, 5])
    facts = read_index(tmp_path / "a")
    assert (facts.dtype, facts.itemsize, facts.num_sequences, facts.num_documents) == ("uint16", 2, 3, 3)
    assert (facts.num_tokens, facts.bin_bytes_expected, facts.bin_bytes_found) == (12, 24, 24)
    assert check_prefix(tmp_path / "a") == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda p: (p / "a.bin").unlink(), "a.bin is missing"),
        (lambda p: (p / "a.idx").unlink(), "a.idx is missing"),
        (lambda p: cut(p / "a.bin", 20), "a.bin is cut short"),
        (lambda p: (p / "a.bin").write_bytes(bytes(30)), "longer than its index"),
        (lambda p: cut(p / "a.idx", 60), "a.idx is cut short"),
        (lambda p: cut(p / "a.idx", 15), "a.idx is cut short"),
        (lambda p: cut(p / "a.idx", 0), "is not an index"),
        (lambda p: (p / "a.idx").write_bytes(b"PK" * 40), "is not an index"),
        (lambda p: write_pair(p / "a", []), "holds no documents"),
    ],
)
def test_each_damage_is_one_finding(tmp_path: Path, harm: Callable[[Path], object], words: str) -> None:
    write_pair(tmp_path / "a", [3, 4, 5])
    harm(tmp_path)
    findings = check_prefix(tmp_path / "a")
    assert len(findings) == 1
    assert words in findings[0].what
    assert findings[0].expected and findings[0].found and findings[0].do


def test_both_files_missing_are_two_findings_and_an_extension_is_named(tmp_path: Path) -> None:
    assert len(check_prefix(tmp_path / "none")) == 2
    assert check_prefix(f"{tmp_path}/a.bin")[0].do == f"write {tmp_path}/a"


def test_ten_million_sequences_are_read_at_once(tmp_path: Path) -> None:
    count = 10_000_000
    with (tmp_path / "big.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 4, count, count + 1))
        file.seek(HEADER.size + 4 * (count - 1))
        file.write(struct.pack("<i", 7))
        file.seek(HEADER.size + 4 * count + 8 * (count - 1))
        file.write(struct.pack("<q", 4_000))
        file.truncate(HEADER.size + 20 * count + 8)
    start = time.perf_counter()
    assert read_index(tmp_path / "big").num_tokens == 1_007
    assert time.perf_counter() - start < 0.2


def test_folders_without_a_manifest_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data prepare INPUT"):
        load_manifest(tmp_path)
    (tmp_path / ".partial").mkdir()
    with pytest.raises(UserError, match="interrupted preparation"):
        load_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(UserError, match="format version 99"):
        load_manifest(tmp_path)


def test_these_checks_import_nothing_heavy() -> None:
    code = "import sys, data.manifest, data.indexed; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"numpy", "torch", "transformers", "pyarrow", "rich"}.isdisjoint(found)
