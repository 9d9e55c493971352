"""data inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import PreflightError, UserError
from data.inspect import inspect_corpus
from data.prepare.prepare import prepare_corpus
from tests.data.corpora import make_texts, write_jsonl


def test_inspect_shows_counts_and_borders(tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", make_texts(200))))
    inspect_corpus(tmp_path / "out", samples=2)
    shown = capsys.readouterr().out
    for split in manifest.splits.values():
        assert f"{split.documents:,}" in shown and f"{split.tokens:,}" in shown
    assert shown.count("ends with id 319") == 6 and "320 ok" in shown
    assert manifest.tokenizer.fingerprint[:16] in shown
    inspect_corpus(tmp_path / "out" / "test", samples=1)  # a bare prefix finds the tokenizer beside it
    assert "test document 0" in capsys.readouterr().out


def test_inspect_of_a_folder_of_corpora_shows_them_all(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_jsonl(tmp_path / "a.jsonl", make_texts(200))
    manifests = [prepare_corpus(ask(texts, output=tmp_path / "all" / name)) for name in ("one", "two/inner")]
    inspect_corpus(tmp_path / "all")
    shown = capsys.readouterr().out
    assert "one" in shown and "two/inner" in shown and "2 corpora" in shown
    assert shown.count(f"{manifests[0].splits['train'].tokens:,}") == 2
    with pytest.raises(UserError, match="not a prepared corpus"):
        inspect_corpus(tmp_path / "all" / "one" / "tokenizer")


def test_inspect_names_ids_above_the_vocabulary_and_damage(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", make_texts(200))))
    data = bytearray((tmp_path / "out" / "test.bin").read_bytes())
    data[0:2] = (40_000).to_bytes(2, "little")
    (tmp_path / "out" / "test.bin").write_bytes(data)
    inspect_corpus(tmp_path / "out" / "test", samples=0)
    assert "EXCEEDED" in capsys.readouterr().out
    (tmp_path / "out" / "test.bin").write_bytes(data[:-2])
    with pytest.raises(PreflightError, match="cut short"):
        inspect_corpus(tmp_path / "out")
    with pytest.raises(PreflightError, match="without extension"):
        inspect_corpus(tmp_path / "test.bin")
    with pytest.raises(UserError, match="is no corpus"):
        inspect_corpus(tmp_path / "nothing")
