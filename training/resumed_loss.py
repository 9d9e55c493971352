"""A resumed run goes on with the loss at which it stopped: damaged weights show in its first step."""

from __future__ import annotations

import logging
import math
import statistics
from typing import Any

from common.commands import launch_command
from common.errors import GateError
from common.json_files import read_json_lines
from common.rundir import RunDir

_ROWS = 20  # recorded steps to compare with
_NATS = 0.5  # above the highest of them, or _DEVIATIONS standard deviations if these are more
_DEVIATIONS = 4.0
log = logging.getLogger("launch")


def check_resumed_loss(run: RunDir, start: int, loss: float, grad_norm: float | None, same_data_since: int = 0) -> None:
    """Compare the first step after `start` with the steps recorded up to there.

    Args:
        start: the step of the checkpoint.
        loss: of the first step after it, in nats per token.
        grad_norm: its gradient norm, where it is known.
        same_data_since: the step from which the present stage or blend is read: the loss before it was one on other
            text, and says nothing.

    Raises:
        GateError: the loss is far above what was recorded, is not a number, or the gradient is exactly zero.
    """
    rows: list[dict[str, Any]] = read_json_lines(run.metrics, last_bytes=1 << 20)
    recorded = [row for row in rows if isinstance(row.get("loss"), float) and row.get("step", start) <= start]
    before = [row["loss"] for row in recorded if row.get("step", start) > same_data_since][-_ROWS:]
    if not before:
        if recorded:
            log.info("resume: the loss is not compared: another stage or blend begins at step %d", same_data_since)
        limit, expected = math.inf, "a loss that is a number, and a gradient"
    else:
        limit = max(before) + max(_NATS, _DEVIATIONS * statistics.pstdev(before))
        expected = f"a loss of at most {limit:.3f} nats after step {start} (recorded: {before[-1]:.3f})"
    if not recorded or (loss <= limit and math.isfinite(loss) and grad_norm != 0.0):
        return
    verify = launch_command("list", str(run.path), "--verify")
    raise GateError(
        "the resumed run does not go on where it stopped",
        expected=expected,
        found=f"loss {loss:.3f}, gradient norm {grad_norm if grad_norm is not None else 'unknown'}",
        do=f"check the checkpoints with `{verify}`; delete a bad one and resume again",
    )
