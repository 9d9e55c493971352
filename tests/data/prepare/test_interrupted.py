"""data prepare killed anywhere: it continues to the same bytes, and nothing looks complete before it is."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from data.manifest import Manifest, load_manifest
from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.prepare.shard import run_shard
from tests.data.corpora import contents, make_texts, prepare_and_kill, write_jsonl


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> tuple[PrepareRequest, Manifest]:
    """A request that was never interrupted, and what it gave."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_jsonl(folder / "a.jsonl", make_texts(500) + make_texts(100))
    request = PrepareRequest(
        inputs=[str(source)], output=folder / "out", tokenizer=str(tokenizer_dir), split="80,10,10", shard_bytes=20_000,
        dedup=True, workers=1,
    )  # fmt: skip
    return request, prepare_corpus(request)


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
    tmp_path: Path,
    whole: tuple[PrepareRequest, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    calls: int,
) -> None:
    monkeypatch.setattr("data.prepare.merge.SYNC_BYTES", 4_000)
    uninterrupted, manifest = whole
    assert sum(split.duplicates_dropped for split in manifest.splits.values()) == 100
    request = replace(uninterrupted, output=tmp_path / "out")
    prepare_and_kill(request, target, calls)
    if (target, calls) not in [("data.prepare.publish.load_manifest", 1), ("shutil.rmtree", 3)]:
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    assert prepare_corpus(request) == manifest
    assert contents(tmp_path / "out") == contents(Path(uninterrupted.output))
    assert not (tmp_path / "out" / ".partial").exists()


def test_a_kill_after_publishing_cannot_spoil_an_overwrite(tmp_path: Path, ask: Any) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    whole = prepare_corpus(ask(source))
    before = contents(tmp_path / "out")
    prepare_and_kill(ask(source, overwrite=True), "shutil.rmtree", 4)
    assert prepare_corpus(ask(source, overwrite=True)) == whole
    assert contents(tmp_path / "out") == before


def test_finished_shards_are_not_done_again(tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(write_jsonl(tmp_path / "a.jsonl", make_texts(500)))
    prepare_and_kill(request, "data.prepare.shard._write_batch", 4)
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
