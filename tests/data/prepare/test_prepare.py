"""data prepare: byte-identical to Megatron's builder, with any number of workers and either tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.inspect import open_pair
from data.manifest import SPLITS, Manifest, load_manifest
from data.prepare.prepare import prepare_corpus
from data.tokenizer import fingerprint, load_tokenizer
from tests.data.corpora import FILES, contents, documents, make_texts, write_jsonl


@pytest.mark.nemo
def test_files_equal_what_megatrons_builder_writes(tmp_path: Path, ask: Any) -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    texts = make_texts(600)
    manifest = prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", texts)))
    hf = load_tokenizer(manifest.tokenizer.source).backend_tokenizer
    hf.encode_special_tokens = True
    assert manifest.dtype == "uint16" and manifest.special_text_documents > 100
    left = list(texts)
    for split in SPLITS:
        builder = IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=np.uint16)
        kept = documents(tmp_path / "out", split)
        own = set(kept)
        assert [text for text in left if text in own] == kept  # source order
        for text in kept:
            builder.add_item(torch.IntTensor([*hf.encode(text).ids, manifest.tokenizer.eod_id]))
            builder.end_document()
        builder.finalize(str(tmp_path / "megatron.idx"))
        for kind in ("bin", "idx"):
            assert (tmp_path / f"megatron.{kind}").read_bytes() == (tmp_path / f"out/{split}.{kind}").read_bytes()
        facts = manifest.splits[split]
        assert (facts.documents, facts.text_bytes) == (len(kept), sum(len(text.encode()) for text in kept))
        assert facts.tokens == (tmp_path / "megatron.bin").stat().st_size // 2
    assert sum(split.documents for split in manifest.splits.values()) == len(texts)
    copy = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert fingerprint(copy) == manifest.tokenizer.fingerprint == load_manifest(tmp_path / "out").tokenizer.fingerprint


def raw_documents(folder: Path, split: str, tokenizer: Any) -> list[str]:
    pair, start, found = open_pair(folder / split), 0, []
    for length in pair.lengths.tolist():
        found.append(tokenizer.decode(pair.ids[start : start + length - 1].tolist()))
        start += length
    return found


@pytest.mark.nemo
def test_large_vocabularies_are_int32_as_megatrons_builder_writes(tmp_path: Path, ask: Any) -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    shutil.copytree(ask("x").tokenizer, tmp_path / "large")
    behaviour = json.loads((tmp_path / "large" / "tokenizer.json").read_text())
    behaviour["model"]["vocab"] |= {f"extra {number}": number for number in range(320, 65_600)}
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(behaviour))
    tokenizer = load_tokenizer(tmp_path / "large")
    texts = make_texts(60)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    manifest = prepare_corpus(ask(source, tokenizer=str(tmp_path / "large")))
    builder = IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=np.int32)
    tokenizer.backend_tokenizer.encode_special_tokens = True
    kept = [text for text in texts if text in set(raw_documents(tmp_path / "out", "train", tokenizer))]
    for text in kept:
        builder.add_item(torch.IntTensor([*tokenizer.backend_tokenizer.encode(text).ids, manifest.tokenizer.eod_id]))
        builder.end_document()
    builder.finalize(str(tmp_path / "megatron.idx"))
    assert manifest.dtype == "int32" and len(kept) == manifest.splits["train"].documents > 30
    for kind in ("bin", "idx"):
        assert (tmp_path / f"megatron.{kind}").read_bytes() == (tmp_path / f"out/train.{kind}").read_bytes()


@pytest.mark.slow
def test_worker_count_does_not_change_a_byte(tmp_path: Path, ask: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(800) + make_texts(300))
    one = prepare_corpus(ask(source, output=tmp_path / "1" / "c", dedup=True))
    two = prepare_corpus(ask(source, output=tmp_path / "2" / "c", dedup=True, workers=2))
    assert one == two and one.encoding.batches > 5
    assert contents(tmp_path / "1" / "c") == contents(tmp_path / "2" / "c")


def test_added_data_moves_no_document(tmp_path: Path, ask: Any) -> None:
    texts, more = make_texts(400), make_texts(400, seed=1)
    known = set(texts)
    prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", texts), output=tmp_path / "before"))
    prepare_corpus(ask(write_jsonl(tmp_path / "b.jsonl", more + texts), output=tmp_path / "after"))
    for split in SPLITS:
        before, after = documents(tmp_path / "before", split), documents(tmp_path / "after", split)
        assert before == [text for text in after if text in known]
    prepare_corpus(ask(tmp_path / "a.jsonl", output=tmp_path / "other", seed=7))
    assert documents(tmp_path / "other", "test") != documents(tmp_path / "before", "test")


def test_dedup_keeps_the_first_and_counts_the_rest(tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = make_texts(300)
    source = write_jsonl(tmp_path / "a.jsonl", texts + texts[::-1] + texts[:50])
    prepare_corpus(ask(write_jsonl(tmp_path / "once.jsonl", texts), output=tmp_path / "once"))
    monkeypatch.setattr("data.prepare.merge.DEDUP_RECORDS", 100)  # several passes over the hashes
    manifest = prepare_corpus(ask(source, dedup=True))
    assert sum(split.duplicates_dropped for split in manifest.splits.values()) == 350
    assert [(tmp_path / "out" / n).read_bytes() for n in FILES] == [(tmp_path / "once" / n).read_bytes() for n in FILES]
    kept = prepare_corpus(ask(source, output=tmp_path / "all"))
    assert sum(split.documents for split in kept.splits.values()) == 650


def test_without_gigatoken_the_ids_are_the_same(
    tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    prepare_corpus(ask(source, output=tmp_path / "auto"))
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    manifest: Manifest = prepare_corpus(ask(source, output=tmp_path / "hf"))
    assert manifest.encoding.path == "hf" and manifest.encoding.documents_checked == 0
    assert "gigatoken is not installed" in caplog.text
    assert [(tmp_path / "hf" / n).read_bytes() for n in FILES] == [(tmp_path / "auto" / n).read_bytes() for n in FILES]
