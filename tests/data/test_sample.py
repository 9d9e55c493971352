"""data inspect, and the parts of data sample that do not take its ten seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import PreflightError, UserError
from data.inspect import inspect_corpus
from data.prepare.prepare import prepare_corpus
from data.sample import _join_docstrings, _read_topics, collect_code, collect_prose
from tests.data.prepare.test_prepare import ask, make_texts, tokenizer_dir, write_jsonl

__all__ = ["ask", "tokenizer_dir"]  # fixtures


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


def test_the_sample_has_enough_of_both_domains() -> None:
    prose, code = list(collect_prose()), list(collect_code())
    assert len(_read_topics()) > 50 and prose[0] and "assert" in prose[0]
    assert sum(map(len, prose)) > 1_500_000 and max(map(len, prose[100:])) < 100_000
    assert 3_000_000 < sum(map(len, code)) <= 6_000_000
    assert list(_join_docstrings(iter(["a" * 3000, "b" * 3000, "c" * 300, "d"]))) == [
        "a" * 3000 + "\n\n" + "b" * 3000,
        "c" * 300 + "\n\nd",
    ]
