"""Step lines and metrics: short enough for a terminal, with the memory that the process holds."""

from __future__ import annotations

import logging
import os
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from common import logs
from training import heartbeat, progress, status_callback

pytestmark = pytest.mark.nemo


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (8123.4, "8,123"), (99_999, "99,999"), (269_123, "269.1k"), (1_234_567, "1.23M")]
)
def test_short_count(count: float, text: str) -> None:
    assert progress.short_count(count) == text


def test_a_step_line_fits_100_columns(caplog: pytest.LogCaptureFixture) -> None:
    """A long run on many GPUs, as the console shows it: date, time and level before the message."""
    row: dict[str, Any] = {"step": 99_999, "loss": 12.3456, "lr": 1.234e-4, "tokens_per_second": 1_234_567.8}
    trainer = types.SimpleNamespace(max_steps=100_000, callbacks=[])
    with caplog.at_level("INFO", logger="launch"):
        progress.Progress()._log(trainer, {**row, "step_seconds": 360_000.0})
    line = logging.Formatter(logs.CONSOLE_FORMAT, logs.CONSOLE_TIME).format(caplog.records[0])
    assert line.endswith("step 99999/100000 | loss 12.3456 | lr 1.23e-04 | 1.23M tokens/s | ETA 4d04h")
    assert len(line) <= 100


class SimpleBar:
    """Keeps what a bar is given."""

    def update(self, task: Any, **fields: Any) -> None:
        self.fields = fields


def test_the_console_knows_when_max_time_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    from lightning.pytorch.callbacks import Timer

    trainer: Any = types.SimpleNamespace(max_steps=100_000, callbacks=[Timer(duration="00:01:00:00")])
    row = {"step": 10, "loss": 2.0, "lr": 1e-4, "tokens_per_second": 1.0, "step_seconds": 60.0}
    shown = progress.Progress()
    shown._bar = SimpleBar()
    with caplog.at_level("INFO", logger="launch"):
        shown._log(trainer, row)
    eta = caplog.messages[0].rpartition("ETA ")[2]
    assert eta in ("59m59s", "1h00m")  # 69 days without it
    assert shown._bar.fields["eta"] == eta


def test_memory_of_a_cpu_run_is_that_of_the_process() -> None:
    """Against the kernel's own count of resident pages."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    expected = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    assert progress.memory_gib(torch.device("cpu")) == pytest.approx(expected, rel=0.05)


def test_the_status_knows_when_max_time_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.callbacks import Timer

    recorded: dict[str, Any] = {}
    monkeypatch.setattr(heartbeat, "record", lambda **fields: recorded.update(fields))
    callback: Any = status_callback.StatusCallback()
    trainer = types.SimpleNamespace(callbacks=[Timer(duration="00:01:00:00")], global_step=3, max_steps=9)
    callback.on_train_start(trainer, None)
    assert (recorded["step"], recorded["max_steps"]) == (3, 9)
    assert recorded["ends_by"] - time.time() == pytest.approx(3600, abs=5)
    trainer.callbacks = []
    callback.on_train_start(trainer, None)
    assert recorded["ends_by"] is None
