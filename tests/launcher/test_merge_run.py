"""What `soup` refuses before it imports torch. The merge itself: tests/training/test_stages_run.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import run_lock
from common.errors import UserError
from common.rundir import RunDir
from launcher.merge_run import choose_checkpoints, soup
from recipes.merge_weights import ONE_SQRT


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir("r", tmp_path)
    for step in (10, 20, 30):
        _checkpoint(run, step, layers=4)
    return run


def _checkpoint(run: RunDir, step: int, layers: int) -> None:
    folder = run.checkpoints / f"step-{step}"
    for part in ("weights", "context"):
        (folder / part).mkdir(parents=True)
    (folder / "weights" / "metadata.json").write_text("{}")
    (folder / "context" / "model.yaml").write_text(f"config: {{num_layers: {layers}}}\n")


def test_the_newest_ones(run: RunDir) -> None:
    assert [path.name for path in choose_checkpoints(run, 2)] == ["step-20", "step-30"]
    (run.checkpoints / "step-30-unfinished").touch()
    assert [path.name for path in choose_checkpoints(run, None)] == ["step-10", "step-20"]


@pytest.mark.parametrize("last", (0, 1, 4))
def test_another_number_than_there_are(run: RunDir, last: int) -> None:
    with pytest.raises(UserError, match="out of range") as error:
        soup("r", last, ONE_SQRT, None, run.path.parent)
    assert error.value.expected == "2 to 3" and error.value.do.startswith("--last 3;")


def test_one_checkpoint_is_none_to_merge(tmp_path: Path) -> None:
    _checkpoint(run := RunDir("one", tmp_path), 5, layers=4)
    with pytest.raises(UserError, match="nothing to merge"):
        soup("one", None, ONE_SQRT, None, run.path.parent)


def test_names_shapes_and_a_run_that_trains(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot name the new run"):
        soup("r", None, ONE_SQRT, "r", run.path.parent)
    _checkpoint(run, 40, layers=8)
    with pytest.raises(UserError, match="step-10 is of another model") as error:
        soup("r", None, ONE_SQRT, None, run.path.parent)
    assert error.value.found == "num_layers 4, not 8"
    monkeypatch.setattr(run_lock, "is_held_elsewhere", lambda path, role: True)
    with pytest.raises(run_lock.RunInUseError):
        soup("r", 2, "uniform", None, _without(run, 40).parent)
    assert sorted(path.name for path in run.path.parent.iterdir()) == ["r"]


def _without(run: RunDir, step: int) -> Path:
    (run.checkpoints / f"step-{step}" / "weights" / "metadata.json").unlink()
    return run.path
