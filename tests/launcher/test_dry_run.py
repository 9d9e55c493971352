"""What a dry run leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.spec import RunSpec
from launcher.claim import claim_run_directory


@pytest.mark.parametrize("write", (False, True))
def test_a_dry_run_leaves_a_folder_only_if_asked(write: bool, tmp_path: Path) -> None:
    spec = RunSpec(recipe="qwen25_tiny", dryrun=True, write=write, runs=str(tmp_path / "runs"))
    with claim_run_directory(spec) as run:
        run.path.mkdir(parents=True, exist_ok=True)
        (run.path / "spec.json").touch()
    assert run.path.exists() == (tmp_path / "runs").exists() == write


def test_a_dry_run_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    spec = RunSpec(recipe="x", name="r", resume=True, dryrun=True, runs=str(tmp_path))
    with pytest.raises(ValueError), claim_run_directory(spec):
        raise ValueError
    assert (tmp_path / "r" / "checkpoints").exists()


def test_a_refused_launch_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError), claim_run_directory(RunSpec(recipe="x", runs=str(tmp_path))) as run:
        assert run.path.exists()
        raise ValueError
    assert not run.path.exists()
