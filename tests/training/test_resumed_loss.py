"""The first loss of a resumed run, compared with what was recorded before on the same text."""

from __future__ import annotations

import json
import logging
import math
import types
from pathlib import Path

import pytest

from common.errors import GateError
from common.rundir import RunDir
from data.ledger import Ledger, StageEntry
from training.resumed_loss import check_resumed_loss


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """30 steps around 4.0, on a stage that begins at step 10 with a higher loss."""
    rows = [{"step": step, "loss": 3.0 if step <= 10 else 4.0} for step in range(1, 31)]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunDir("a", tmp_path)


@pytest.mark.parametrize(
    ("start", "since", "loss", "norm", "good"),
    [
        (30, 10, 4.4, 1.0, True),
        (30, 10, 4.6, 1.0, False),
        (10, 0, 4.0, 1.0, False),  # another loss on the same text
        (10, 10, 4.0, 1.0, True),  # the next stage, or --change-blend
        (10, 10, 4.0, 0.0, False),
        (10, 10, math.nan, 1.0, False),
        (0, 0, 9.0, 1.0, True),  # nothing is recorded
    ],
)
def test_the_loss_is_compared_with_that_on_the_same_text(
    start: int, since: int, loss: float, norm: float, good: bool, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "launch"):
        if good:
            check_resumed_loss(run, start, loss, norm, since)
        else:
            with pytest.raises(GateError, match=f"list {run.path} --verify"):
                check_resumed_loss(run, start, loss, norm, since)
    assert ("another stage or blend begins at step 10" in caplog.text) == (start == since == 10)


@pytest.mark.nemo
def test_the_gate_knows_the_stage(run: RunDir) -> None:
    from training.gates import TruthGates

    stages = tuple(StageEntry(name, first, 0.0, {}) for name, first in (("all", 0), ("anneal", 10)))
    ledger = Ledger(10, 1, 8, 1, (), stages, (), {})
    trainer = types.SimpleNamespace(
        datamodule=types.SimpleNamespace(ledger=ledger),
        callback_metrics={"reduced_train_loss": 4.0, "grad_norm": 1.0},
        is_global_zero=True,
    )
    for start in (10, 9):
        gate = TruthGates(str(run.path))
        gate._resumed_at = start
        if start == 10:
            gate.on_train_batch_end(trainer)
            continue
        with pytest.raises(GateError):
            gate.on_train_batch_end(trainer)
