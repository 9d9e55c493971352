"""What a dry run leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.rundir import RunDir
from common.spec import RunSpec
from launcher import launch


@pytest.mark.parametrize("write", (False, True))
def test_a_dry_run_leaves_a_folder_only_if_asked(write: bool, tmp_path: Path) -> None:
    spec = RunSpec(recipe="qwen25_tiny", dryrun=True, write=write)
    run = RunDir("r", tmp_path / "runs")
    with launch._removed_after_dry_run(spec, run):
        run.path.mkdir(parents=True)
        (run.path / "spec.json").touch()
    assert run.path.exists() == (tmp_path / "runs").exists() == write


def test_a_dry_run_keeps_what_was_there(tmp_path: Path) -> None:
    run = RunDir("r", tmp_path)
    (run.path / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError), launch._removed_after_dry_run(RunSpec(recipe="x", dryrun=True), run):
        raise ValueError
    assert (run.path / "checkpoints").exists()
