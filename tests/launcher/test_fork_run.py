"""`fork` and `resume RUN --from step-N`: a new run with the older checkpoint, its records and metrics up to there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from common.origin import Origin, read_origin
from common.rundir import RunDir
from common.spec import RunSpec
from launcher.fork_run import fork, forked, started_fork


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir("r", tmp_path / "runs")
    for step in (10, 20):
        weights = run.checkpoints / f"step-{step}" / "weights"
        weights.mkdir(parents=True)
        (weights / "metadata.json").write_text("{}")
    run.attempt(1).mkdir(parents=True)
    run.write(RunSpec(recipe="qwen25_tiny", name="r", overrides=("data.seed=3",)), "a: 1\n", [], ["launch.py", "one"])
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (5, 10, 15, 20)))
    return run


def test_the_new_run_holds_what_came_before_the_checkpoint(run: RunDir) -> None:
    with forked(run, "step-10", None) as new:
        assert new.name == "r-from-step-10"
        assert [path.name for path in new.complete_checkpoints()] == ["step-10"]
        assert [json.loads(line)["step"] for line in new.metrics.read_text().splitlines()] == [5, 10]
        assert (new.spec().name, new.spec().overrides, new.attempts) == ("r-from-step-10", ("data.seed=3",), [])
        new.attempt(1).mkdir(parents=True)  # as a start leaves it
    assert new.path.exists()
    assert [path.name for path in run.complete_checkpoints()] == ["step-10", "step-20"]
    (new.checkpoints / "step-10" / "weights" / "metadata.json").unlink()
    assert (run.checkpoints / "step-10" / "weights" / "metadata.json").exists()


def test_nothing_stays_of_a_launch_that_started_nothing(run: RunDir) -> None:
    with pytest.raises(ZeroDivisionError), forked(run, "10", "other") as new:
        assert new.name == "other"
        raise ZeroDivisionError
    assert [path.name for path in run.path.parent.iterdir()] == ["r"]


def test_what_cannot_be_forked(run: RunDir) -> None:
    with pytest.raises(UserError, match="no complete checkpoint step-11") as error, forked(run, "11", None):
        pass
    assert error.value.do == "step-20 is the newest"
    with pytest.raises(UserError, match="cannot name the new run"), forked(run, "10", "r"):
        pass


def test_what_cannot_be_continued_makes_no_run(run: RunDir) -> None:
    """Overrides are read before anything is written; a finished run has to be given more steps."""
    root = run.path.parent
    with pytest.raises(UserError, match="foo.bar"):
        fork("r", "20", "other", ("foo.bar=1",), root=root)
    with pytest.raises(UserError, match="cannot name a run") as error:
        fork("r", "20", "an other", root=root)
    assert error.value.do == "a name such as my-run"
    with pytest.raises(UserError, match="no step is left to train after step-20") as error:
        fork("r", "20", "other", ("max_steps=20",), root=root)
    assert error.value.do.endswith(f"launch.py fork {run.path} 20 other max_steps=40")
    assert [path.name for path in root.iterdir()] == ["r"]
    assert fork("r", "20", "other", ("max_steps=21",), root=root).endswith("other max_steps=21")


def test_a_fork_says_where_it_comes_from_and_how_it_goes_on(run: RunDir) -> None:
    """A fork of a fork names both; from a plateau the command lets the learning rate decay."""
    root = run.path.parent
    assert fork("r", "20", "second", root=root).endswith(f"launch.py resume {root / 'second'}")
    wsd = ("optim.lr_scheduler.kind=wsd", "optim.lr_scheduler.decay_end=None", "optim.lr_scheduler.warmup_steps=5")
    second = RunDir("second", root)
    second.spec_file.write_text(RunSpec(recipe="qwen25_tiny", name="second", overrides=wsd).to_json())
    assert fork("second", "step-20", "third", root=root).endswith("third fork_step=20 decay_steps=4 max_steps=24")
    with started_fork("second", "20", "fourth", ("max_steps=30",), root=root) as (new, words):
        assert (new.name, words) == ("fourth", ["fork_step=20", "decay_steps=4", "max_steps=24", "max_steps=30"])
    assert not (root / "fourth").exists()  # nothing was started in it
    with_words = fork("second", "20", "fifth", ("max_steps=30",), root=root)
    assert with_words.endswith("fifth fork_step=20 decay_steps=4 max_steps=24 max_steps=30")
    origin = read_origin(RunDir("third", root).origin)
    assert origin is not None and origin.describe() == (
        f"forked from {root / 'second'} at step 20; {root / 'second'} was forked from {run.path} at step 20"
    )


def test_a_merge_cannot_be_trained_on(run: RunDir) -> None:
    Origin(kind="merge", run="runs/a", steps=(10, 20), weights=(0.5, 0.5), shape="uniform").write(run.origin)
    with pytest.raises(UserError, match="merged of several checkpoints") as error:
        fork("r", "20", "other", root=run.path.parent)
    assert "fork runs/a 20 NAME" in error.value.do


def test_the_command_of_each_attempt_is_kept(run: RunDir) -> None:
    assert run.command.read_text() == "launch.py one\n"
    run.write(RunSpec(recipe="qwen25_tiny", name="r", attempt=2), "a: 1\n", [], ["launch.py", "resume", "r"])
    assert (run.attempt(1) / "command.txt").read_text() == "launch.py one\n"
    assert run.command.read_text() == "launch.py resume r\n"
