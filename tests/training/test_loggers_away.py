"""A run whose logger's server takes connections and never answers: it ends as without a logger."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.loggers import is_installed
from common.rundir import RunDir
from report.send.service import Sent
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def test_a_server_that_never_answers(
    sample: Path, forked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed("wandb"):
        pytest.skip("wandb is not installed")
    steps = (*SHORT, "trainer.max_steps=3")
    (tmp_path / "off").mkdir()
    off = forked(train, sample, *steps, cwd=tmp_path / "off")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        on = forked(train, sample, *steps, "log.loggers=wandb")  # which ends with 0
    assert [row["loss"] for row in on if "loss" in row] == [row["loss"] for row in off if "loss" in row]
    run = RunDir.at(tmp_path / "runs" / "run")
    assert Sent.load(run, "wandb").bytes == 0  # nothing has arrived
    assert "no connection; the training goes on" in (run.path / "logs/attempt-1/rank-0.log").read_text()
