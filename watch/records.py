"""What a run directory says about a run at this moment, for the monitor, the list and the diagnosis."""

from __future__ import annotations

import functools
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import rank_states, run_status
from common.errors import UserError
from common.json_files import read_json_lines, read_json_object
from common.metric_rows import Row, read_metric_rows
from common.rank_states import RankState
from common.run_status import RunStatus, read_status
from common.rundir import RUNS, RunDir
from recipes.plan import Plan
from recipes.resolve import resolve

_METRICS_BYTES = 4 * 2**20  # the last 10,000 lines and more
_SAMPLES_BYTES = 2**20  # the last hours of one node
_PHASE_OF = {
    rank_states.DONE: run_status.DONE,
    rank_states.FAILED: run_status.FAILED,
    rank_states.INTERRUPTED: run_status.INTERRUPTED,
    rank_states.RUNNING: run_status.TRAINING,
}


@dataclass(frozen=True)
class Records:
    """A run directory, read once.

    Args:
        status: status.json, or what older runs without one allow to say.
        ranks: the last recorded state of each rank of the newest attempt.
        training, validation: rows of metrics.jsonl by ascending step; what a resumed run repeats counts once.
        samples: rows of system*.jsonl of the newest attempt, by time.
        plan: the run's numbers; None where its recipe can no longer be resolved.
    """

    run: RunDir
    status: RunStatus
    ranks: tuple[RankState, ...]
    training: tuple[Row, ...]
    validation: tuple[Row, ...]
    samples: tuple[Row, ...]
    plan: Plan | None

    @property
    def may_retry(self) -> bool:
        """The run was started with --retries."""
        return bool((read_json_object(self.run.spec_file) or {}).get("retries"))

    @property
    def logs(self) -> Path:
        """The log folder of the newest attempt."""
        return self.run.attempt(self.status.attempt)

    @property
    def step_seconds_median(self) -> float | None:
        """Over this attempt's rows, without the first, which holds the start-up."""
        return _median(row.get("step_seconds") for row in self._own_rows())

    @property
    def tokens_per_second_median(self) -> float | None:
        """Over the same rows."""
        return _median(row.get("tokens_per_second") for row in self._own_rows())

    def _own_rows(self) -> list[Row]:
        return [row for row in self.training if row.get("time", 0.0) >= self.status.started][1:]


def _median(values: Any) -> float | None:
    found = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return statistics.median(found) if found else None


def read_records(run: RunDir) -> Records:
    """Read whatever the run directory holds; a file that is absent or cut off leaves its part empty."""
    training, validation = read_metric_rows(run.metrics, _METRICS_BYTES)
    status = read_status(run.status) or _status_without_file(run, training)
    ranks = tuple(rank_states.read(run.attempt(status.attempt)))
    if ranks and status.phase not in run_status.ENDED:
        status = replace(status, ranks=tuple(state.heartbeat() for state in ranks))  # newer than rank 0's copy
    return Records(run, status, ranks, training, validation, _read_samples(run, status), _plan(run))


def _read_samples(run: RunDir, status: RunStatus) -> tuple[Row, ...]:
    rows = [row for path in run.path.glob("system*.jsonl") for row in read_json_lines(path, _SAMPLES_BYTES)]
    own = [row for row in rows if row.get("attempt") == status.attempt and isinstance(row.get("time"), int | float)]
    return tuple(sorted(own, key=lambda row: float(row["time"])))


def _status_without_file(run: RunDir, training: tuple[Row, ...]) -> RunStatus:
    """From the ranks' files and the metrics, for a run that was started before status.json existed."""
    attempts = len(run.attempts)
    states = rank_states.read(run.attempt(attempts)) if attempts else []
    last = training[-1] if training else {}
    failed = rank_states.first_failure(states)
    state = failed.state if failed else states[0].state if states else ""
    whole = run.complete_checkpoints()
    times = [s.time for s in states] + [last.get("time", 0.0)]
    return RunStatus(
        phase=_PHASE_OF.get(state, run_status.STARTING),
        attempt=max(1, attempts),
        world_size=max(1, len(states)),
        host="",
        pid=0,
        started=0.0,
        updated=max(times),
        step=last.get("step", 0),
        max_steps=plan.max_steps if (plan := _plan(run)) else 0,
        loss=last.get("loss"),
        lr=last.get("lr"),
        step_seconds=last.get("step_seconds"),
        tokens_per_second=last.get("tokens_per_second"),
        checkpoint=whole[-1].name if whole else "",
        ranks=tuple(s.heartbeat() for s in states),
    )


def _plan(run: RunDir) -> Plan | None:
    try:
        return _resolve(run.spec_file, run.spec_file.stat().st_mtime)
    except Exception:  # a recipe that was renamed, or a file of the user's that no longer runs
        return None


@functools.lru_cache(maxsize=256)
def _resolve(spec_file: Path, changed: float) -> Plan:
    from common.spec import RunSpec

    return resolve(RunSpec.from_json(spec_file.read_text())).plan


def list_runs(root: Path = RUNS) -> list[RunDir]:
    """Every run under `root` in which something was started, newest first."""
    found = [RunDir(path.name, root) for path in root.glob("*") if path.is_dir()]
    return sorted((run for run in found if _started(run)), key=_last_write, reverse=True)


def _started(run: RunDir) -> bool:
    return run.status.is_file() or run.logs.is_dir() or run.checkpoints.is_dir()


def _last_write(run: RunDir) -> float:
    paths = (run.status, run.metrics, run.logs, run.path)
    return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def newest_run(root: Path = RUNS) -> RunDir:
    """The run that was written to last.

    Raises:
        UserError: there is none.
    """
    if runs := list_runs(root):
        return runs[0]
    raise UserError(
        "there is no run yet",
        expected=f"a run directory under {root}",
        found="none" if root.is_dir() else f"no folder {root} here",
        do="python launch.py --recipe qwen25_tiny starts one",
    )
