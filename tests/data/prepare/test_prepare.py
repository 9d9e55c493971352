"""data prepare: byte-identical to Megatron's builder, to itself whatever happens, and clear about bad input."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from data.indexed import check_prefix
from data.inspect import open_pair
from data.manifest import SPLITS, Manifest, load_manifest
from data.prepare import publish
from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.prepare.shard import run_shard
from data.tokenizer import fingerprint, load_tokenizer
from tests.data.prepare.test_encode import tokenizer_dir

__all__ = ["tokenizer_dir"]  # the fixture
WORDS = [
    "river",
    "stone",
    "cloud",
    "winter",
    "engine",
    "garden",
    "café",
    "日本語",
    "naïve",
    "mirror",
    "letter",
    "42",
    "isn't",
    "<|endoftext|>",
]
FILES = [f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")]


def make_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + f" {seed}-{number}" for number in range(count)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def ask(tmp_path: Path, tokenizer_dir: Path) -> Callable[..., PrepareRequest]:
    """`ask(input, ...)`: a request with small shards and one worker."""

    def make(*inputs: Path | str, **options: Any) -> PrepareRequest:
        defaults: dict[str, Any] = {"output": tmp_path / "out", "tokenizer": str(tokenizer_dir), "workers": 1}
        defaults |= {"split": "80,10,10", "shard_bytes": 20_000}
        return PrepareRequest(inputs=[str(path) for path in inputs], **{**defaults, **options})

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in [*FILES, "manifest.json"]}


def documents(folder: Path, split: str) -> list[str]:
    pair, found, start = open_pair(folder / split), [], 0
    tokenizer = load_tokenizer(folder / "tokenizer")
    for length in pair.lengths.tolist():
        ids = pair.ids[start : start + length].tolist()
        assert ids[-1] == len(tokenizer) - 1 and ids[-1] not in ids[:-1]
        found.append(tokenizer.decode(ids[:-1]))
        start += length
    return found


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
        assert [text for text in left if text in set(kept)] == kept  # source order
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


def raw_documents(folder: Path, split: str, tokenizer: Any) -> list[str]:
    pair, start, found = open_pair(folder / split), 0, []
    for length in pair.lengths.tolist():
        found.append(tokenizer.decode(pair.ids[start : start + length - 1].tolist()))
        start += length
    return found


def test_worker_count_does_not_change_a_byte(tmp_path: Path, ask: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(800) + make_texts(300))
    one = prepare_corpus(ask(source, output=tmp_path / "1" / "c", dedup=True))
    two = prepare_corpus(ask(source, output=tmp_path / "2" / "c", dedup=True, workers=2))
    assert one == two and one.encoding.batches > 5
    assert contents(tmp_path / "1" / "c") == contents(tmp_path / "2" / "c")


def killed(request: PrepareRequest, target: str, calls: int) -> None:
    """Prepare in a fork that dies by SIGKILL in the given call of the function `target`."""
    module, name = target.rsplit(".", 1)
    import importlib

    def run() -> None:
        owner = importlib.import_module(module)
        real, left = getattr(owner, name), [calls]

        def stop(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, stop)
        prepare_corpus(request)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        ("data.prepare.shard._write_batch", 4),  # inside a shard
        ("data.prepare.merge._append", 3),  # a .bin half merged
        ("data.prepare.merge._sync_and_delete", 4),  # shards appended, not yet deleted
        ("data.prepare.merge._write_idx", 2),  # one split done
        ("data.prepare.publish.load_manifest", 1),  # published, not yet reported
        ("shutil.rmtree", 2),  # built, nothing published
        ("shutil.rmtree", 3),  # published, work folder still there
    ],
)
def test_a_run_killed_anywhere_continues_to_the_same_bytes(
    tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch, target: str, calls: int
) -> None:
    monkeypatch.setattr("data.prepare.merge.SYNC_BYTES", 4_000)
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(500) + make_texts(100))
    whole = prepare_corpus(ask(source, output=tmp_path / "whole" / "out", dedup=True))
    assert sum(split.duplicates_dropped for split in whole.splits.values()) == 100
    request = ask(source, dedup=True)
    killed(request, target, calls)
    if (target, calls) not in [("data.prepare.publish.load_manifest", 1), ("shutil.rmtree", 3)]:
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    assert prepare_corpus(request) == whole
    assert contents(tmp_path / "out") == contents(tmp_path / "whole" / "out")
    assert not (tmp_path / "out" / ".partial").exists()


def test_a_kill_after_publishing_cannot_spoil_an_overwrite(tmp_path: Path, ask: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    whole = prepare_corpus(ask(source))
    before = contents(tmp_path / "out")
    killed(ask(source, overwrite=True), "shutil.rmtree", 4)
    assert prepare_corpus(ask(source, overwrite=True)) == whole
    assert contents(tmp_path / "out") == before


def test_finished_shards_are_not_done_again(tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(write_jsonl(tmp_path / "a.jsonl", make_texts(500)))
    killed(request, "data.prepare.shard._write_batch", 4)
    done = len(list((tmp_path / "out/.partial/shards").glob("*.json")))
    again: list[int] = []

    def recording(index: int, *rest: Any) -> None:
        again.append(index)
        run_shard(index, *rest)

    monkeypatch.setattr("data.prepare.workers.run_shard", recording)
    prepare_corpus(request)
    assert done == 3 and again and min(again) == 3


def test_a_manifest_moves_in_last(tmp_path: Path, ask: Any) -> None:
    """Killed between the moves: files may lie there, but nothing that looks whole."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(200))
    first = prepare_corpus(ask(source))
    request = ask(source, overwrite=True, seed=5)

    def run() -> None:
        real: Any = Path.replace
        names: list[str] = []

        def stop(path: Path, target: Any) -> Any:
            if Path(target).parent == tmp_path / "out":
                names.append(path.name)
                if len(names) == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(path, target)

        setattr(Path, "replace", stop)  # noqa: B010 (an assignment is refused by the type checker)
        prepare_corpus(request)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(UserError, match="interrupted preparation"):
        load_manifest(tmp_path / "out")
    assert prepare_corpus(request) == prepare_corpus(replace(request, output=tmp_path / "fresh" / "out"))
    assert load_manifest(tmp_path / "out").seed == 5 != first.seed


def test_added_data_moves_no_document(tmp_path: Path, ask: Any) -> None:
    texts, more = make_texts(400), make_texts(400, seed=1)
    prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", texts), output=tmp_path / "before"))
    prepare_corpus(ask(write_jsonl(tmp_path / "b.jsonl", more + texts), output=tmp_path / "after"))
    for split in SPLITS:
        before, after = documents(tmp_path / "before", split), documents(tmp_path / "after", split)
        assert before == [text for text in after if text in set(texts)]
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


def test_every_format_gives_the_same_documents(tmp_path: Path, ask: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [f'{text}\nsecond line, "quoted"' for text in make_texts(300)]
    folder = tmp_path / "in"
    folder.mkdir()
    lines = write_jsonl(folder / "a.jsonl", texts).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:0]) + gzip.compress(lines))
    with pyarrow.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines)
    table = pyarrow.table({"id": range(300), "text": texts})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=40)
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["id", "text"], *([number, text] for number, text in enumerate(texts))])
    (folder / "e.csv").write_bytes(b"\xef\xbb\xbf" + buffer.getvalue().encode())
    (folder / "f.txt").mkdir()
    for number, text in enumerate(texts):
        (folder / "f.txt" / f"{number:03d}.txt").write_text(text, newline="")
    (folder / "g.txt").write_text("\n \n\n".join(texts), newline="")
    wanted = None
    for path in sorted(folder.iterdir()):
        options = {"txt_unit": "paragraph"} if path.name == "g.txt" else {}
        prepare_corpus(ask(path, output=tmp_path / path.name, shard_bytes=3_000, **options))
        found = [(tmp_path / path.name / name).read_bytes() for name in FILES]
        wanted = wanted or found
        assert found == wanted, path.name
    prepare_corpus(ask(str(folder / "*.jsonl*"), output=tmp_path / "glob", dedup=True))
    assert [(tmp_path / "glob" / name).read_bytes() for name in FILES] == wanted


def test_ranges_of_a_line_file_lose_and_double_nothing(tmp_path: Path, ask: Any) -> None:
    texts = make_texts(300)
    path = tmp_path / "a.txt"
    path.write_text("\r\n".join(texts), newline="")
    for size in (101, 997, 10_000_000):
        output = tmp_path / str(size)
        prepare_corpus(ask(path, output=output, txt_unit="line", shard_bytes=size, split="1,1,1"))
        assert sorted(sum((documents(output, split) for split in SPLITS), [])) == sorted(texts)


GOOD = [json.dumps({"text": text}).encode() for text in make_texts(300)]
BAD_LINES = {
    "broken JSON": (b'{"text": "cut', "a.jsonl:251: broken JSON"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "a.jsonl:251: not UTF-8"),
    "missing field": (b'{"txt": "a", "id": 2}', r"a.jsonl:251: no field 'text'[\s\S]*did you mean 'txt'"),
    "number": (b'{"text": 5}', "a.jsonl:251: field 'text' is no text"),
    "array": (b'["a"]', "a.jsonl:251: a JSON list"),
    "surrogate": (b'{"text": "\\ud800"}', "a.jsonl:251: text that is no valid Unicode"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_stops_with_its_number_or_is_counted(tmp_path: Path, ask: Any, name: str) -> None:
    line, message = BAD_LINES[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*GOOD[:250], line, *GOOD[250:]]))
    with pytest.raises(UserError, match=message):
        prepare_corpus(ask(path, shard_bytes=5_000))
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = prepare_corpus(ask(path, shard_bytes=5_000, on_error="skip"))
    assert manifest.lines_skipped == 1
    assert sum(split.documents for split in manifest.splits.values()) == 300


def cases(folder: Path) -> Iterator[tuple[str, list[Path | str], dict[str, Any], str]]:
    """Bad input, what is asked for, and words of the answer."""
    good = write_jsonl(folder / "good.jsonl", make_texts(100))
    yield "nothing matches", [folder / "none*.jsonl"], {}, "no input file matches"
    (folder / "empty").mkdir()
    yield "empty folder", [folder / "empty"], {}, "a folder without any such file"
    (folder / "a.docx").write_bytes(b"PK")
    yield "unknown kind", [folder / "a.docx"], {}, "unknown kind of file"
    (folder / "zero.jsonl").write_bytes(b"")
    yield "empty file", [folder / "zero.jsonl"], {}, "the corpus is empty"
    yield "only blanks", [write_jsonl(folder / "blank.jsonl", [" ", "\n", ""])], {}, "3 empty and 0 skipped"
    yield "few documents", [write_jsonl(folder / "few.jsonl", ["one", "two"])], {}, "no document fell into"
    (folder / "latin.txt").write_bytes(b"first\ncaf\xe9")
    yield "latin text", [folder / "latin.txt"], {}, r"latin.txt:2: not UTF-8 \(byte 9 of the file\)"
    (folder / "a.csv").write_text("id,body\n1,x\n")
    yield "no column", [folder / "a.csv"], {}, "fields 'id', 'body'"
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    yield "no parquet", [folder / "a.parquet"], {}, "not a readable parquet file"
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(good.read_bytes())[:-300])
    yield "cut gzip", [folder / "cut.jsonl.gz"], {}, "cannot be decompressed"
    import pyarrow

    with pyarrow.output_stream(str(folder / "whole.jsonl.zst"), compression="zstd") as stream:
        stream.write(good.read_bytes())
    (folder / "cut.jsonl.zst").write_bytes((folder / "whole.jsonl.zst").read_bytes()[:-30])
    yield "cut zstd", [folder / "cut.jsonl.zst"], {}, "cannot be decompressed"
    yield "share of zero", [good], {"split": "99,1,0"}, "each of train, validation, test needs a share"
    yield "unknown policy", [good], {"on_error": "ignore"}, "stop or skip"


def test_bad_input_says_what_and_leaves_nothing(tmp_path: Path, ask: Any) -> None:
    for name, inputs, options, words in cases(tmp_path):
        with pytest.raises(UserError, match=words) as raised:
            prepare_corpus(ask(*inputs, **options))
        assert raised.value.exit_code == 2 and raised.value.expected and raised.value.found, name
        assert not (tmp_path / "out").exists(), name


def test_another_tokenizer_or_option_is_refused(tmp_path: Path, ask: Any, tokenizer_dir: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|more|>"]})
    tokenizer.save_pretrained(tmp_path / "other")
    other = ask(source, tokenizer=str(tmp_path / "other"))
    killed(ask(source), "data.prepare.shard._write_batch", 3)
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
