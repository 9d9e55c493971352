"""The output folder: other corpora, other preparations, and a disk that is too small."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from data.indexed import check_prefix
from data.prepare import publish
from data.prepare.prepare import prepare_corpus
from data.tokenizer import load_tokenizer
from tests.data.corpora import contents, make_texts, prepare_and_kill, write_jsonl


def test_another_tokenizer_or_option_is_refused(tmp_path: Path, ask: Any, tokenizer_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    tokenizer.save_pretrained(tmp_path / "other")
    other = ask(source, tokenizer=str(tmp_path / "other"))
    prepare_and_kill(ask(source), "data.prepare.shard._write_batch", 3)
    with pytest.raises(UserError, match="an interrupted run made differently[\\s\\S]*tokenizer: "):
        prepare_corpus(other)
    first = prepare_corpus(ask(source))
    before = contents(tmp_path / "out")
    assert prepare_corpus(ask(source)) == first
    with pytest.raises(UserError, match="a corpus made differently[\\s\\S]*tokenizer: "):
        prepare_corpus(other)
    with pytest.raises(UserError, match="seed: 1234 then, 9 now"):
        prepare_corpus(ask(source, seed=9))
    assert contents(tmp_path / "out") == before
    write_jsonl(source, make_texts(310))
    with pytest.raises(UserError, match="inputs: 1 files then"):
        prepare_corpus(ask(source))
    assert prepare_corpus(replace(other, overwrite=True)).tokenizer.vocab_size == first.tokenizer.vocab_size + 1


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """1.5 MB of real disk at `folder`; skips the test where that takes rights it does not have."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_that_looks_whole(tmp_path: Path, ask: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["8" * 3000 + str(number) for number in range(500)])
    with small_disk(tmp_path / "disk"):
        filler = tmp_path / "disk" / "filler"
        filler.write_bytes(bytes(800_000))
        request = ask(source, output=tmp_path / "disk" / "c", shard_bytes=200_000)
        with pytest.raises(UserError, match="the disk is full[\\s\\S]*bytes free[\\s\\S]*it continues"):
            prepare_corpus(request)
        assert [path.name for path in (tmp_path / "disk" / "c").iterdir()] == [".partial"]
        filler.unlink()
        shutil.copytree(tmp_path / "disk" / "c" / ".partial", tmp_path / "moved" / "c" / ".partial")
    assert any((tmp_path / "moved" / "c" / ".partial" / "shards").glob("*.json"))
    whole = prepare_corpus(replace(request, output=tmp_path / "moved" / "c"))
    assert check_prefix(tmp_path / "moved" / "c" / "train") == []
    assert whole == prepare_corpus(replace(request, output=tmp_path / "fresh" / "c"))


def test_too_little_space_is_refused_up_front(tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UserError, match="not enough space[\\s\\S]*1,000 bytes free"):
        prepare_corpus(ask(source))


def test_a_second_preparation_into_the_same_folder_is_refused(tmp_path: Path, ask: Any) -> None:
    (tmp_path / "out").mkdir()
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(100))
    with publish.lock_output(tmp_path / "out"), pytest.raises(UserError, match="is in use"):
        prepare_corpus(ask(source))
