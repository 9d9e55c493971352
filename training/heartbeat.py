"""A rank's signs of life: every few seconds to logs/attempt-N/rank-R.json, and by rank 0 to runs/NAME/status.json.

The training loop only sets numbers in memory; a thread writes them, so the loop and the GPU never wait for a file
system. Free of torch, so that it starts before the long imports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any

from common import rank_states, run_status
from common.errors import EXIT_RUN
from common.rank_states import RankState
from common.run_status import Ending, RunStatus
from common.rundir import RunDir

log = logging.getLogger("launch")
_PHASE_OF = {
    rank_states.DONE: run_status.DONE,
    rank_states.FAILED: run_status.FAILED,
    rank_states.INTERRUPTED: run_status.INTERRUPTED,
}


class Heartbeat:
    """Writes the state of one rank until `end`.

    Args:
        run: the run directory.
        rank: this process's rank; rank 0 writes status.json too.
        status: what is known at the start: attempt, executor, world size, number of steps.
        interval_s: seconds between two writes; by default 5, and more above 80 ranks, since rank 0 reads all files.
    """

    def __init__(self, run: RunDir, rank: int, status: RunStatus, interval_s: float | None = None) -> None:
        self.run, self.rank, self.status = run, rank, status
        self._logs = run.attempt(status.attempt)
        self._interval_s = interval_s or max(run_status.HEARTBEAT_S, status.world_size / 16)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._logged_problem = False

    def start(self) -> None:
        """Write once and start the thread."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._write(RankState(rank=self.rank, phase=self.status.phase), self.status)
        threading.Thread(target=self._repeat, name="heartbeat", daemon=True).start()

    def record(self, **fields: Any) -> None:
        """Set fields of the status in memory; the next write takes them."""
        self.status = dataclasses.replace(self.status, **fields)

    def end(self, state: RankState) -> None:
        """Write the final state of this rank and stop. A later call replaces the state."""
        now = self.status
        with self._lock:
            self._ended.set()
            state = dataclasses.replace(state, phase=now.phase, step=now.step, step_time=now.step_time)
            error = state.error[-run_status.MOST_ERROR_TEXT :]
            ending = Ending(exit_code=state.exit_code, rank=self.rank, host=state.host, error=error)
            final = dataclasses.replace(now, phase=_PHASE_OF[state.state], ending=ending)
            self._write(state, final)

    def _repeat(self) -> None:
        while not self._ended.wait(self._interval_s):
            with self._lock:
                now = self.status
                if not self._ended.is_set():
                    state = RankState(rank=self.rank, phase=now.phase, step=now.step, step_time=now.step_time)
                    self._write(state, now)

    def _write(self, state: RankState, status: RunStatus) -> None:
        """Whatever fails, the training goes on: the first failed write is logged, the next ones are tried again."""
        try:
            state.write(self._logs)
            if self.rank == 0:
                self._complete(status).write(self.run.status)
        except Exception as problem:  # a rank that falls silent is taken for dead
            if not self._logged_problem:
                log.warning("status: cannot write %s: %s: %s", self.run.status, type(problem).__name__, problem)
            self._logged_problem = True

    def _complete(self, status: RunStatus) -> RunStatus:
        """With what other processes wrote: the newest checkpoint and the other ranks' heartbeats."""
        beats = tuple(state.heartbeat() for state in rank_states.read(self._logs))
        name, written = status.checkpoint, status.checkpoint_time
        with contextlib.suppress(OSError, ValueError):  # retention deletes a folder while it is looked at
            if whole := self.run.complete_checkpoints():
                name, written = whole[-1].name, (whole[-1] / "weights" / "metadata.json").stat().st_mtime
        return dataclasses.replace(status, updated=time.time(), ranks=beats, checkpoint=name, checkpoint_time=written)


_current: Heartbeat | None = None  # of this process: one process is one rank


def start(run: RunDir, rank: int, status: RunStatus) -> None:
    """Start writing this rank's state."""
    global _current
    _current = Heartbeat(run, rank, status)
    _current.start()


def record(**fields: Any) -> None:
    """Set fields of the run's status (common/run_status.py) for the next write; without a heartbeat nothing happens."""
    if _current is not None:
        _current.record(**fields)


def enter_phase(phase: str) -> None:
    """Say what the run does from now on: one of the phases of common/run_status.py."""
    if _current is not None and _current.status.phase != phase:
        _current.record(phase=phase)


def record_metrics(row: dict[str, Any]) -> None:
    """Take the loss and the rates from a training row of metrics.jsonl."""
    if "loss" in row:
        record(**{name: row.get(name) for name in ("loss", "lr", "step_seconds", "tokens_per_second")})


def record_failure(text: str) -> None:
    """Record that this rank failed, where the process ends without an exception."""
    if _current is not None:
        _current.end(RankState(rank=_current.rank, state=rank_states.FAILED, exit_code=EXIT_RUN, error=text))


def end(state: RankState, logs: Path) -> None:
    """Write the final state of this rank to its log folder, also where no heartbeat was started."""
    if _current is not None:
        _current.end(state)
    else:
        state.write(logs)
