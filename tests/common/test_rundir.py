"""Naming a run on the command line: NAME or runs/NAME, and what an unknown name is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.rundir import RunDir, choose, find_checkpoint, find_run
from common.spec import RunSpec


def _write_checkpoint(run: RunDir, step: int, complete: bool = True) -> Path:
    folder = run.checkpoints / f"step-{step}"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights/metadata.json").write_text("{}")
    if not complete:
        (run.checkpoints / f"step-{step}-unfinished").touch()
    return folder


def test_a_run_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunDir("mine").path.mkdir(parents=True)
    for words in ("mine", "runs/mine", "runs/mine/", str(tmp_path / "runs/mine"), Path("runs/mine")):
        assert find_run(words).path.resolve() == (tmp_path / "runs/mine").resolve()
    with pytest.raises(UserError) as error:
        find_run("runs/mien")
    assert "did you mean mine?" in error.value.do and error.value.expected == "one of mine"
    with pytest.raises(UserError, match="no runs at all in elsewhere"):
        find_run("elsewhere/mine")


def test_a_run_stands_for_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = RunDir("mine", tmp_path)
    with pytest.raises(UserError, match="no runs at all"):
        find_checkpoint("mine", tmp_path)
    run.path.mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoint("mine", tmp_path)
    first, second = _write_checkpoint(run, 9), _write_checkpoint(run, 80)
    _write_checkpoint(run, 90, complete=False)
    assert find_checkpoint("mine", tmp_path) == second == find_checkpoint(run.path)
    assert find_checkpoint(first) == first


def test_a_training_run_may_be_named_by_its_path(tmp_path: Path) -> None:
    run = RunDir("mine", tmp_path)
    assert choose(RunSpec(recipe="tiny", name=str(run.path)), tmp_path).path == run.path
    _write_checkpoint(run, 5)
    assert choose(RunSpec(recipe="tiny", name=str(run.path), resume=True), tmp_path).path == run.path
    with pytest.raises(UserError, match="unknown run 'mien'") as error:
        choose(RunSpec(recipe="tiny", name="mien", resume=True), tmp_path)
    assert "did you mean mine?" in error.value.do
