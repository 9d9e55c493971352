"""Naming a run on the command line: NAME or runs/NAME, what an unknown name is answered with, and new names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.errors import UserError
from common.rundir import RunDir, check_resumable, check_run_name, choose, find_checkpoint, find_run
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


def test_other_names_in_a_run_are_left_alone(tmp_path: Path) -> None:
    run = RunDir("mine", tmp_path)
    for name in ("attempt-2", "attempt-10", "attempt-x", "attempt-3 copy"):
        (run.logs / name).mkdir(parents=True)
    (run.logs / "attempt-4").touch()
    assert [path.name for path in run.attempts] == ["attempt-2", "attempt-10"]
    first, second = _write_checkpoint(run, 40), _write_checkpoint(run, 9)
    for name in ("step-40 copy", "step-x", "step-60-v1"):
        (run.checkpoints / name / "weights").mkdir(parents=True)
        (run.checkpoints / name / "weights/metadata.json").write_text("{}")
    assert run.complete_checkpoints() == [second, first]
    assert run.set_aside_unfinished() == []
    assert (run.checkpoints / "step-x").is_dir()
    assert choose(RunSpec(recipe="mine", resume=True), tmp_path).path == run.path


def test_the_newest_unfinished_checkpoint_is_kept(tmp_path: Path) -> None:
    run = RunDir("mine", tmp_path)
    (run.checkpoints / "unfinished-step-90-after-attempt-2").mkdir(parents=True)
    (run.checkpoints / "unfinished-mine").mkdir()
    for number in range(1, 11):
        run.attempt(number).mkdir(parents=True)
    for step in (5, 20, 10):
        _write_checkpoint(run, step, complete=False)
    assert [path.name for path in run.set_aside_unfinished()] == ["unfinished-step-20-after-attempt-10"]
    left = sorted(path.name for path in run.checkpoints.iterdir())
    assert left == ["unfinished-mine", "unfinished-step-20-after-attempt-10"]


@pytest.mark.parametrize("name", ["a b", "a%j", "a\nb", "-a", "", "a'b", "ä", "a" * 61, "a/b", "..", "_a"])
def test_one_rule_for_the_names_of_runs(tmp_path: Path, name: str) -> None:
    """A name that one executor would refuse or read otherwise is refused by all, before anything is written."""
    with pytest.raises(UserError, match="cannot name a run"):
        check_run_name(name)
    with pytest.raises(UserError):
        choose(RunSpec(recipe="tiny", name=name or " "), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_run_names(tmp_path: Path) -> None:
    spec = RunSpec(recipe="tiny")
    assert choose(spec, tmp_path).name == "tiny"
    (tmp_path / "tiny" / "logs" / "attempt-1").mkdir(parents=True)
    assert choose(spec, tmp_path).name == "tiny-2"
    with pytest.raises(UserError, match="holds a run already"):
        choose(dataclasses.replace(spec, name="tiny"), tmp_path)
    for bad in ("a/b", "..", " ", "/abs"):
        with pytest.raises(UserError, match="cannot name a run"):
            choose(dataclasses.replace(spec, name=bad), tmp_path)


def test_resume_takes_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    spec = RunSpec(recipe="tiny", resume=True)
    with pytest.raises(UserError, match="nothing to resume"):
        choose(spec, tmp_path)
    run = RunDir("tiny", tmp_path)
    (run.logs / "attempt-1").mkdir(parents=True)
    _write_checkpoint(run, 90, complete=False)
    with pytest.raises(UserError, match="nothing to resume(?s:.*)launch.py list` shows"):
        check_resumable(choose(spec, tmp_path))
    run.run_file.write_text("recipe: tiny\nname: tiny\n")
    with pytest.raises(UserError, match="nothing to resume") as caught:
        check_resumable(choose(spec, tmp_path))
    assert f"launch.py --config {run.run_file} --name tiny-again`" in str(caught.value)
    _write_checkpoint(run, 9)
    _write_checkpoint(run, 80)
    chosen = choose(spec, tmp_path)
    check_resumable(chosen)
    assert chosen.complete_checkpoints()[-1].name == "step-80"
