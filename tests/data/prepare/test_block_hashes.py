"""Blocks of a .bin file whose hashes the manifest holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data.block_hashes import BLOCK_BYTES, MAX_BLOCKS, block_starts, find_changed_block, hash_blocks
from data.manifest import SPLITS
from data.prepare.prepare import prepare_corpus
from tests.data.corpora import make_texts, write_jsonl


def test_blocks_cover_a_small_file_and_both_ends_of_a_large_one() -> None:
    assert block_starts(0) == []
    assert block_starts(1) == [0]
    assert block_starts(2 * BLOCK_BYTES + 1) == [0, BLOCK_BYTES, 2 * BLOCK_BYTES]
    large = 10_000 * BLOCK_BYTES + 7
    starts = block_starts(large)
    assert len(starts) == MAX_BLOCKS and starts[0] == 0 and starts[-1] == large - BLOCK_BYTES
    assert all(later - earlier >= BLOCK_BYTES for earlier, later in zip(starts, starts[1:], strict=False))


def test_a_flipped_bit_is_found_where_its_block_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(3 * BLOCK_BYTES + 5))
    recorded = hash_blocks(path)
    assert len(recorded) == 4 and find_changed_block(path, recorded) is None
    with path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 9)
        file.write(b"\x01")
    assert find_changed_block(path, recorded, count=4) == 2 * BLOCK_BYTES
    assert find_changed_block(path, []) is None


def test_a_prepared_corpus_has_them(tmp_path: Path, ask: Any) -> None:
    manifest = prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", make_texts(200))))
    for split in SPLITS:
        assert manifest.splits[split].bin_blocks == hash_blocks(tmp_path / "out" / f"{split}.bin") != []
