"""A .bin/.idx that another program has made becomes a corpus, or is refused with what is wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ProjectError
from data.indexed import check_prefix
from data.inspect import inspect_corpus, open_pair
from data.manifest import SPLITS
from data.prepare import adopt
from data.prepare.adopt import adopt_corpus
from data.prepare.merge import write_idx
from data.sample import train_tokenizer
from data.tokenizer import load_tokenizer
from tests.data.corpora import PROSE, make_texts

TEXTS = [text.replace("<|endoftext|>", "") for text in make_texts(400)]


def _write(prefix: Path, documents: list[list[int]], dtype: str = "int32") -> Path:
    lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
    ends = np.cumsum(lengths) * np.dtype(dtype).itemsize
    Path(f"{prefix}.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    write_idx(Path(f"{prefix}.idx"), lengths, ends - lengths * np.dtype(dtype).itemsize, dtype)
    return prefix


@pytest.fixture(scope="module")
def encoded(tokenizer_dir: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(tokenizer_dir)
    return [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in TEXTS]


def test_an_adopted_corpus_holds_every_document_once(
    tmp_path: Path, tokenizer_dir: Path, encoded: list[list[int]], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt, "BLOCK", 50)  # the blocks of a large file
    prefix = _write(tmp_path / "theirs_text_document", encoded, "uint16")
    manifest = adopt_corpus(str(prefix), str(tokenizer_dir), tmp_path / "out")
    found = []
    for split in SPLITS:
        assert check_prefix(tmp_path / "out" / split) == []
        pair = open_pair(tmp_path / "out" / split)
        starts = (pair.offsets // 2).tolist()
        found += [pair.ids[start : start + n].tolist() for start, n in zip(starts, pair.lengths.tolist(), strict=True)]
        facts = manifest.splits[split]
        assert (facts.documents, facts.tokens) == (len(pair.lengths), int(pair.lengths.sum())) and facts.documents
    assert sorted(found) == sorted(encoded)
    tokenizer = load_tokenizer(tokenizer_dir)
    texts = [tokenizer.decode(ids[:-1]) for ids in found]
    assert sum(split.text_bytes for split in manifest.splits.values()) == sum(len(text.encode()) for text in texts)
    assert Path(tmp_path / "out/train.bin").stat().st_ino == Path(f"{prefix}.bin").stat().st_ino  # no copy
    assert (manifest.dtype, manifest.encoding.path) == ("uint16", "adopted")
    inspect_corpus(tmp_path / "out", samples=3)
    assert "NOT the end-of-document token" not in capsys.readouterr().out
    with pytest.raises(ProjectError, match="holds a corpus already"):
        adopt_corpus(str(prefix), str(tokenizer_dir), tmp_path / "out")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(18, "another file system")))
    adopt_corpus(str(prefix), str(tokenizer_dir), tmp_path / "linked")
    assert (tmp_path / "linked" / "train.bin").is_symlink() and check_prefix(tmp_path / "linked" / "train") == []


def _build_with_megatron(prefix: Path, documents: list[list[int]], pieces: int) -> None:
    """By Megatron's own builder, each document as so many sequences, as its preprocess_data.py does by sentence."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(400))
    for ids in documents:
        size = -(-len(ids) // pieces)
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        builder.add_document(torch.tensor(ids), [len(part) for part in parts])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.nemo
def test_a_corpus_of_megatrons_own_builder(
    tmp_path: Path, tokenizer_dir: Path, encoded: list[list[int]], forked: Callable[..., Any]
) -> None:
    for pieces in (1, 3):
        forked(_build_with_megatron, tmp_path / f"text-{pieces}", encoded, pieces)
    with pytest.raises(ProjectError, match="cannot be adopted") as refused:
        adopt_corpus(str(tmp_path / "text-3"), str(tokenizer_dir), tmp_path / "out")
    assert "without --split-sentences" in refused.value.explain()
    manifest = adopt_corpus(str(tmp_path / "text-1"), str(tokenizer_dir), tmp_path / "out")
    assert manifest.dtype == "uint16" and sum(one.documents for one in manifest.splits.values()) == len(encoded)
    found = []
    for split in SPLITS:
        pair = open_pair(tmp_path / "out" / split)
        starts = (pair.offsets // 2).tolist()
        found += [pair.ids[start : start + n].tolist() for start, n in zip(starts, pair.lengths.tolist(), strict=True)]
    assert sorted(found) == sorted(encoded)


def _cut_bin(prefix: Path) -> None:
    path = Path(f"{prefix}.bin")
    path.write_bytes(path.read_bytes()[:-400])


def _other_idx(prefix: Path) -> None:
    _write(prefix.with_name("other"), [[1, 2, 319]] * 50)
    prefix.with_name("other.idx").replace(f"{prefix}.idx")


def _moved_offset(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    raw = bytearray(path.read_bytes())
    place = 34 + 4 * len(TEXTS) + 8 * 7
    raw[place] ^= 4
    path.write_bytes(raw)


def _sentences(prefix: Path) -> None:
    """As Megatron writes a document of several sequences."""
    path = Path(f"{prefix}.idx")
    raw = path.read_bytes()
    (count,) = np.frombuffer(raw[26:34], dtype="<u8")
    path.write_bytes(raw[:26] + np.uint64(count - 1).tobytes() + raw[34:-16] + raw[-8:])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut .bin": (_cut_bin, "is cut short"),
    "no .idx": (lambda prefix: Path(f"{prefix}.idx").unlink(), "theirs.idx is missing"),
    "another .idx": (_other_idx, "the .idx belongs to another file"),
    "moved offset": (_moved_offset, r"one after the other[\s\S]*document 7 is not"),
    "sentences": (_sentences, r"one sequence per document[\s\S]*--split-sentences"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_pair_is_refused(tmp_path: Path, tokenizer_dir: Path, encoded: list[list[int]], name: str) -> None:
    damage, message = DAMAGE[name]
    damage(_write(tmp_path / "theirs", encoded))
    with pytest.raises(ProjectError) as caught:
        adopt_corpus(str(tmp_path / "theirs"), str(tokenizer_dir), tmp_path / "out")

    assert re.search(message, caught.value.explain()) and not (tmp_path / "out").exists()


IDS: dict[str, tuple[Callable[[list[list[int]], int], list[list[int]]], str]] = {
    "above the vocabulary": (lambda docs, eod: [*docs, [320, eod]], r"does not have[\s\S]*320"),
    "negative": (lambda docs, eod: [[-1, eod], *docs], r"does not have[\s\S]*-1 at id 0"),
    "no ends": (lambda docs, eod: [ids[:-1] for ids in docs if len(ids) > 1], r"400 of 400[\s\S]*--tokenizer"),
    "an end missing": (lambda docs, eod: [*docs[:9], docs[9][:-1], *docs[10:]], r"1 of 400[\s\S]*--append-eod"),
    "other tokenizer": (lambda docs, eod: [[*((i + 40) % eod for i in ids[:-1]), eod] for ids in docs], "not those"),
    "two documents": (lambda docs, eod: docs[:2], "too few documents"),
}  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_ids_that_are_not_the_tokenizers(
    tmp_path: Path, tokenizer_dir: Path, encoded: list[list[int]], name: str
) -> None:
    change, message = IDS[name]
    _write(tmp_path / "theirs", change(encoded, encoded[0][-1]))
    with pytest.raises(ProjectError) as caught:
        adopt_corpus(str(tmp_path / "theirs"), str(tokenizer_dir), tmp_path / "out")
    assert re.search(message, caught.value.explain())
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_ids_of_another_type(tmp_path: Path, tokenizer_dir: Path) -> None:
    _write(tmp_path / "theirs", [[1, 2, 319]] * 9, "int64")
    with pytest.raises(ProjectError, match="ids of type int64"):
        adopt_corpus(str(tmp_path / "theirs"), str(tokenizer_dir), tmp_path / "out")


def test_the_bytes_of_ids_are_those_of_the_text(tokenizer_dir: Path) -> None:
    from data.prepare.prepare import tokenizer_facts

    tokenizer = train_tokenizer({"prose": PROSE}, vocab_size=300)
    sizes = adopt._bytes_of_ids(tokenizer, tokenizer_facts("x", tokenizer))
    text = "café 日本語 👩‍👩‍👧 isn't\n\n  x"
    assert int(sizes[tokenizer.encode(text)].sum()) == len(text.encode())
