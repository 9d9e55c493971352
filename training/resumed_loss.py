"""A resumed run goes on with the loss at which it stopped: damaged weights show in its first step."""

from __future__ import annotations

import statistics
from typing import Any

from common.errors import GateError
from common.json_files import read_json_lines
from common.rundir import RunDir

_ROWS = 20  # recorded steps to compare with
_NATS = 0.5  # above the highest of them, or _DEVIATIONS standard deviations if these are more
_DEVIATIONS = 4.0


def check_resumed_loss(run: RunDir, start: int, loss: float, grad_norm: float | None) -> None:
    """Compare the first step after `start` with the steps recorded up to there.

    Args:
        start: the step of the checkpoint.
        loss: of the first step after it, in nats per token.
        grad_norm: its gradient norm, where it is known.

    Raises:
        GateError: the loss is far above what was recorded, is not a number, or the gradient is exactly zero.
    """
    rows: list[dict[str, Any]] = read_json_lines(run.metrics, last_bytes=1 << 20)
    before = [row["loss"] for row in rows if isinstance(row.get("loss"), float) and row.get("step", start) <= start]
    before = before[-_ROWS:]
    if not before:
        return
    limit = max(before) + max(_NATS, _DEVIATIONS * statistics.pstdev(before))
    if loss <= limit and grad_norm != 0.0:
        return
    raise GateError(
        "the resumed run does not go on where it stopped",
        expected=f"a loss of at most {limit:.3f} nats after step {start} (recorded: {before[-1]:.3f})",
        found=f"loss {loss:.3f}, gradient norm {grad_norm if grad_norm is not None else 'unknown'}",
        do="check the checkpoints with `python launch.py list NAME --verify`; delete a bad one and resume again",
    )
