"""Run directories as a run leaves them, without a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import run_status
from common.rank_states import FAILED, RankState
from common.run_status import RunStatus
from common.rundir import RunDir
from common.spec import RunSpec

START = 1795297000.0  # of the sample files


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDir]:
    """`make_run(phase="training", step=40, ...)`: a run of two ranks with its status and its spec."""

    def make(name: str = "mine", *, recipe: str = "qwen25_500m_cpt", overrides: Any = (), **fields: Any) -> RunDir:
        run = RunDir(name, tmp_path / "runs")
        run.attempt(1).mkdir(parents=True, exist_ok=True)
        run.spec_file.write_text(RunSpec(recipe=recipe, name=name, overrides=tuple(overrides)).to_json())
        fields = {"phase": run_status.TRAINING, "executor": "local", "step": 40, "max_steps": 200, **fields}
        fields = {"world_size": 2, "host": "node-a", "started": START, "updated": START + 60, **fields}
        RunStatus(**fields).write(run.status)
        return run

    return make


def fail_rank(run: RunDir, rank: int, error: str, **fields: Any) -> None:
    """A rank that failed as launcher/rank_main.py records it: its state, and its log."""
    state = RankState(rank=rank, state=FAILED, exit_code=1, error=error, host=f"node-{'ab'[rank % 2]}", **fields)
    state.write(run.attempt(1))
    with (run.attempt(1) / f"rank-{rank}.log").open("a") as stream:
        stream.write(f"2026-11-20 10:00:00,000 INFO    rank: an earlier line\n\n{error}\n")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
