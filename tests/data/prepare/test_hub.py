"""A data set of the hub is read from a pinned commit, in ranges; a server on this machine stands in for the hub."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import UserError
from data.prepare.hub_sources import choose_files
from data.prepare.prepare import prepare_corpus
from tests.data.corpora import FILES, make_texts, write_jsonl

FIRST, SECOND = "a" * 40, "b" * 40
TEXTS = make_texts(200)


class Hub(ThreadingHTTPServer):
    """Serves the data set me/set: files by commit; `main` is the newest commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.commits: dict[str, dict[str, bytes]] = {}
        self.head, self.status, self.ranges = FIRST, 200, list[str]()


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:  # noqa: N802
        hub, path = self.server, unquote(self.path.split("?")[0])
        if hub.status != 200:
            return self._send(b"{}", hub.status, X_Error_Code="RepoNotFound")
        if path.startswith("/api/datasets/me/set/revision/"):
            asked = path.rpartition("/")[2]
            commit = hub.head if asked == "main" else asked
            if commit not in hub.commits:
                return self._send(b"{}", 404, X_Error_Code="RevisionNotFound")
            files = hub.commits[commit]
            rows = [{"rfilename": name, "size": len(body), "blobId": "0"} for name, body in files.items()]
            return self._send(json.dumps({"id": "me/set", "sha": commit, "siblings": rows}).encode())
        if "/tree/" in path:
            return self._tree(path)
        _, _, _, _, _, commit, name = path.split("/", 6)  # /datasets/me/set/resolve/COMMIT/NAME
        body = hub.commits[commit][name]
        start, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        hub.ranges.append(f"{start}-{end}")
        part = body[int(start) : int(end) + 1 if end else None]
        return self._send(part, 206, Content_Range=f"bytes {start}-{int(start) + len(part) - 1}/{len(body)}")

    def _tree(self, path: str) -> None:
        """The files of a folder: /api/datasets/me/set/tree/COMMIT/FOLDER."""
        commit, _, folder = path.removeprefix("/api/datasets/me/set/tree/").partition("/")
        files = {name: body for name, body in self.server.commits[commit].items() if name.startswith(f"{folder}/")}
        rows = [{"type": "file", "path": name, "size": len(body), "oid": "0"} for name, body in files.items()]
        self._send(json.dumps(rows).encode())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _http.reset_sessions()
    lines = write_jsonl(tmp_path / "a.jsonl", TEXTS).read_bytes()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=40)
    table = (tmp_path / "a.parquet").read_bytes()
    server.commits[FIRST] = {"README.md": b"# card", "data/train-0.parquet": table, "data/test-0.parquet": table}
    server.commits[SECOND] = {"data/train-0.jsonl": lines, "data/train-1.jsonl.gz": gzip.compress(lines)}
    yield server
    server.shutdown()
    server.server_close()
    _http.reset_sessions()


def test_a_pinned_revision_is_read_in_place_and_stays(
    hub: Hub, tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet and jsonl give the bytes of local files; the commit is recorded, and holds when the branch moves."""
    prepare_corpus(ask(tmp_path / "a.jsonl", output=tmp_path / "local"))
    wanted = [(tmp_path / "local" / name).read_bytes() for name in FILES]
    manifest = prepare_corpus(ask("hf://me/set", shard_bytes=2_000))
    assert [source.path for source in manifest.sources] == [f"hf://datasets/me/set@{FIRST}/data/train-0.parquet"]
    assert [(tmp_path / "out" / name).read_bytes() for name in FILES] == wanted
    assert len(hub.ranges) > 1 and hub.ranges[0] != "0-"  # ranges, not the whole file
    hub.head = SECOND
    assert prepare_corpus(ask("hf://me/set", shard_bytes=2_000)) == manifest  # as it was begun
    again = prepare_corpus(ask("hf://me/set@main/train", output=tmp_path / "two", shard_bytes=2_000, dedup=True))
    assert [source.path.rpartition("/")[2] for source in again.sources] == ["train-0.jsonl", "train-1.jsonl.gz"]
    assert [(tmp_path / "two" / name).read_bytes() for name in FILES] == wanted
    hub.commits[SECOND]["data/train-0.jsonl"] = b'{"text": 5}\n'
    with pytest.raises(UserError, match=r"train-0.jsonl:1: field 'text' is no text"):
        prepare_corpus(ask(f"hf://me/set@{SECOND}", output=tmp_path / "three"))


def test_what_the_hub_refuses_is_said(hub: Hub, tmp_path: Path, ask: Any) -> None:
    def said(text: str) -> str:
        with pytest.raises(UserError) as caught:
            prepare_corpus(ask(text, output=tmp_path / "none"))
        assert not (tmp_path / "none").exists()
        return caught.value.explain()

    assert "names no data set" in said("hf://set")
    assert "has no revision 'v9'" in said("hf://me/set@v9")
    assert "one of train, test" in said("hf://me/set/validation") and "hf://me/set/train" in said("hf://me/set/valid")
    assert "no column 'body'" in _explain(ask("hf://me/set", output=tmp_path / "none", field="body"))
    hub.commits[FIRST] = {"data/train.bin": b"1"}
    assert "no files that can be read" in said("hf://me/set")
    hub.status = 401
    assert "no token that may read it" in said("hf://me/set")
    hub.shutdown()
    hub.server_close()
    assert "cannot be reached" in said("hf://me/set")


def _explain(request: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepare_corpus(request)
    return caught.value.explain()


def test_a_connection_that_is_lost_can_be_continued(
    hub: Hub, tmp_path: Path, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests
    from huggingface_hub.hf_file_system import HfFileSystemFile

    real = HfFileSystemFile._fetch_range

    def fetch(*args: Any) -> bytes:
        if any((tmp_path / "out/.partial/shards").glob("*.json")):  # after the first shard
            raise requests.ConnectionError("gone")
        return bytes(real(*args))

    hub.commits[FIRST] = {"data/train.jsonl": write_jsonl(tmp_path / "b.jsonl", make_texts(8_000)).read_bytes()}
    request = ask("hf://me/set", shard_bytes=1 << 18)
    monkeypatch.setattr(HfFileSystemFile, "_fetch_range", fetch)
    assert "can no longer be read" in (said := _explain(request)) and "it continues" in said
    done = sorted((tmp_path / "out/.partial/shards").glob("*.json"))
    hub.head = "moved"  # the branch; the commit that was begun with is recorded
    monkeypatch.undo()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    seen: list[Any] = []

    def stop(todo: Any, *_: Any) -> None:
        seen.extend(todo)
        _stop()

    monkeypatch.setattr("data.prepare.prepare.run_shards", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(request)
    assert done and seen and not {int(path.stem) for path in done} & set(seen)


def _stop() -> list[str]:
    raise KeyboardInterrupt


def test_offline(ask: Any) -> None:
    """HF_HUB_OFFLINE, which the tests set."""
    with pytest.raises(UserError, match="the hub cannot be reached") as caught:
        prepare_corpus(ask("hf://me/set@main"))
    assert "HF_HUB_OFFLINE" in caught.value.do


CARD = {
    "configs": [
        {
            "config_name": "en",
            "data_files": [{"split": "train", "path": "en/*.parquet"}, {"split": "test", "path": ["x"]}],
        },
        {"config_name": "all", "data_files": "**/*.parquet", "default": True},
    ]
}
NAMES = ["README.md", "en/a.parquet", "en/b.parquet", "de/deep/c.parquet", "x"]


@pytest.mark.parametrize(
    ("card", "config", "split", "expected"),
    [
        (CARD, "en", "train", ["en/a.parquet", "en/b.parquet"]),
        (CARD, None, None, ["de/deep/c.parquet", "en/a.parquet", "en/b.parquet"]),
        (CARD, "fr", None, "one of en, all"),
        (CARD, "en", "valid", "one of train, test"),
        ({"configs": [{"config_name": "a"}, {"config_name": "b"}]}, None, None, "several configs"),
        ({}, "en", None, ["en/a.parquet", "en/b.parquet"]),
        ({}, "fr", None, "one of de, en"),
        ({}, None, None, sorted(NAMES[1:])),
    ],
)
def test_configs_and_splits(card: Any, config: Any, split: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert choose_files(NAMES, card, config, split, "hf://me/set") == expected
        return
    with pytest.raises(UserError) as caught:
        choose_files(NAMES, card, config, split, "hf://me/set")
    assert expected in caught.value.explain()
