"""Uploads to a stand-in of the hub's API on this machine: what is sent, what is refused before anything is sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import launch
from common.errors import UserError
from report.push import plan_upload, push

SECRET = "hf_aVerySecretTokenOfNobody"
CARD = "---\nlicense: apache-2.0\nlanguage: en\n---\n\n# mine\n"


class Hub(ThreadingHTTPServer):
    """The parts of the hub's API that an upload uses, as huggingface_hub 0.36 calls them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, bool] = {"me/open": False}  # name -> private
        self.asked: list[tuple[str, str, str]] = []  # method, path, authorization
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits = 0


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, content: Any, code: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _note(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization") or ""))

    def do_GET(self) -> None:  # noqa: N802
        self._note()
        repo = self.path.removeprefix("/api/models/").split("?")[0].split("/revision")[0]
        if repo in self.server.repos:
            self._send({"id": repo, "private": self.server.repos[repo], "siblings": [], "tags": []})
        else:
            self._send({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_PUT(self) -> None:  # noqa: N802
        self._note()
        self.server.objects[self.path.rpartition("/")[2]] = self._read()
        self._send({})

    def do_POST(self) -> None:  # noqa: N802
        self._note()
        body = self._read()
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            if name.startswith("others/"):
                message = f"You have no access to the namespace with {self.headers['Authorization']}"
                return self._send({"error": message}, 403, X_Error_Message=message)
            self.server.repos[name] = wanted["private"]
            return self._send({"url": f"{self.server.address}/{name}"})
        if self.path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            answers = [
                {"path": one["path"], "uploadMode": mode[one["path"].endswith("safetensors")], "shouldIgnore": False}
                for one in files
            ]
            return self._send({"files": answers})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            there = f"{self.server.address}/objects"
            answers = [{**one, "actions": {"upload": {"href": f"{there}/{one['oid']}"}}} for one in objects]
            return self._send({"transfer": "basic", "objects": answers})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.objects[value["oid"]]
            self.server.commits += 1
            url = "https://huggingface.co/me/mine/commit/abc"
            return self._send({"success": True, "commitOid": "abc", "commitUrl": url, "hookOutput": ""})
        return self._send({"error": f"not known here: {self.path}"}, 404)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub.constants
    from huggingface_hub.utils import reset_sessions

    server = Hub()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    reset_sessions()
    yield server
    server.shutdown()
    reset_sessions()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 7}')
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (folder / "README.md").write_text(CARD)
    for name in NOT_SENT:
        (folder / name).write_text("not for others")
    (folder / ".cache").mkdir()
    return folder


NOT_SENT = ("evaluation.json", "model-old.safetensors", "notes.txt", "secrets.json")


def test_a_private_upload(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch._run(["push", str(model), "me/mine", "--send"]) == 0
    sent = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file() and path.name not in NOT_SENT}
    assert hub.files == sent and hub.repos["me/mine"] is True and hub.commits == 1
    assert {f"Bearer {SECRET}"} == {
        token for method, path, token in hub.asked if path.startswith("/api/models/me/mine")
    }
    out, err = capsys.readouterr()
    assert "me/mine (private)" in out and all(f"not sent: {name}" in out for name in NOT_SENT) and "commit/abc" in out
    assert SECRET not in out + err
    assert launch._run(["push", str(model), "me/mine", "--send"]) == 0  # again, into the same one
    assert hub.commits == 2 and hub.repos["me/mine"] is True


def test_nothing_is_sent_unless_asked(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert launch._run(["push", str(model), "me/mine"]) == 0
    out = capsys.readouterr().out
    assert "model.safetensors" in out and "0.03" in out and "nothing was sent" in out
    assert hub.asked == []


def test_the_hub_refuses(hub: Hub, model: Path) -> None:
    with pytest.raises(UserError, match="no write access to others") as refused:
        push(plan_upload(model, "others/mine"))
    assert SECRET not in str(refused.value) and "***" in str(refused.value)
    with pytest.raises(UserError, match="me/open is public"):
        push(plan_upload(model, "me/open"))
    assert hub.files == {}
    push(plan_upload(model, "me/open", private=False))
    assert "model.safetensors" in hub.files


def test_the_hub_is_not_there(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="the upload failed"):
        push(plan_upload(model, "me/mine"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="unset HF_HUB_OFFLINE"):
        push(plan_upload(model, "me/mine"))
    for value in ("", None):
        monkeypatch.setenv("HF_TOKEN", value) if value is not None else monkeypatch.delenv("HF_TOKEN")
        with pytest.raises(UserError, match="there is no token for the hub"):
            push(plan_upload(model, "me/mine"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "README.md").unlink(), "no model card"),
        (
            lambda folder: (folder / "README.md").write_text(CARD.replace("apache-2.0", "fill-in")),
            "license in its front",
        ),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "front matter of .* cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "without tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "without model.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{}"), "no token that ends a text"),
    ],
)
def test_what_is_not_complete_is_not_sent(model: Path, change: Any, message: str) -> None:
    change(model)
    with pytest.raises(UserError, match=message):
        plan_upload(model, "me/mine")


@pytest.mark.parametrize("name", ["mine", "me/mine/again", "me/..", "me/mi ne", "https://huggingface.co/me"])
def test_names_that_no_repository_has(model: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot name a repository"):
        plan_upload(model, name)
