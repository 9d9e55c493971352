"""The list of a checkpoint's files: what it finds, and what is known of a checkpoint without one."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.checkpoint_files import LIST, check_undamaged, find_damage, record_files
from common.errors import UserError
from common.stored_files import needed_bytes


def _checkpoint(folder: Path) -> Path:
    """A checkpoint of two weight files whose last bytes belong to a tensor, and whose .metadata says so."""
    stored = {
        (name, at): SimpleNamespace(relative_path=name, offset=at, length=500)
        for name in ("__0_0.distcp", "__0_1.distcp")
        for at in (0, 500)
    }
    (folder / "weights").mkdir(parents=True)
    (folder / "weights/.metadata").write_bytes(pickle.dumps(SimpleNamespace(storage_data=stored)))
    for name in ("__0_0.distcp", "__0_1.distcp"):
        (folder / "weights" / name).write_bytes(b"a" * 1000)
    return folder


def test_damage_is_found(tmp_path: Path) -> None:
    _checkpoint(tmp_path)
    (tmp_path / "context").mkdir()
    (tmp_path / "context/x").write_text("x")
    (tmp_path / "weights/__0_0.distcp.sha256").write_text("0" * 64)  # of another content: taken from its writer
    record_files(tmp_path)
    assert not (tmp_path / "weights/__0_0.distcp.sha256").exists()
    (problem,) = find_damage(tmp_path)
    assert problem.startswith("weights/__0_0.distcp has other content")
    record_files(tmp_path)
    check_undamaged(tmp_path)
    os.truncate(tmp_path / "weights/__0_1.distcp", 999)
    (tmp_path / "context/x").unlink()
    assert sorted(find_damage(tmp_path)) == [
        "context/x is missing",
        "weights/__0_1.distcp has 999 bytes and was saved with 1,000",
    ]
    with pytest.raises(UserError, match="context/x is missing"):
        check_undamaged(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[]",
        '{"weights/a": 4}',
        '{"weights/a": {"bytes": 4}}',
        '{"weights/a": {"bytes": "4", "sha256": "0"}}',
    ],
)
def test_a_damaged_list_is_damage(text: str, tmp_path: Path) -> None:
    """Also one that still parses."""
    record_files(_checkpoint(tmp_path))
    (tmp_path / LIST).write_text(text)
    assert find_damage(tmp_path) == ["run/files.json is not a list of files with their sizes and checksums"]


def test_without_a_list_the_lengths_of_the_weight_files_are_known(tmp_path: Path) -> None:
    """Of an imported checkpoint, or one of an earlier version."""
    folder = _checkpoint(tmp_path / "base")
    assert find_damage(folder) == []
    os.truncate(folder / "weights/__0_0.distcp", 999)
    (folder / "weights/__0_1.distcp").unlink()
    assert find_damage(folder) == [
        "weights/__0_0.distcp has 999 bytes, and 1,000 belong to it",
        "weights/__0_1.distcp is missing",
    ]
    (folder / "weights/.metadata").write_bytes(b"m")
    assert find_damage(folder)[0].startswith("weights/.metadata cannot be read")


def test_a_list_that_is_gone_is_damage_where_an_earlier_checkpoint_has_one(tmp_path: Path) -> None:
    first, second, third = (_checkpoint(tmp_path / f"step-{step}") for step in (5, 10, 20))
    record_files(second)
    assert find_damage(first) == []  # of an earlier version
    assert find_damage(third) == ["run/files.json is missing, and step-10 has one"]


class _Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_looking_at_lengths_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(SimpleNamespace(storage_data={1: _Evil(tmp_path / "ran")})))
    with pytest.raises(ValueError, match="relative_path"):
        needed_bytes(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_the_weights_need_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing of a folder lacks a file: it is listed all the same if it exists, and missed if it does not."""
    _checkpoint(tmp_path)
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, like: [p for p in rglob(self, like) if p.name != "__0_1.distcp"])
    record_files(tmp_path)
    assert "weights/__0_1.distcp" in json.loads((tmp_path / LIST).read_text())
    (tmp_path / "weights/__0_1.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_1\.distcp"):
        record_files(tmp_path)
