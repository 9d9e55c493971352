"""runs/NAME/status.json: what a run is doing now, how it ended and why.

The launcher writes it at the start and at the end, rank 0 every few seconds in between (training/heartbeat.py). The
report, `launch.py monitor`, `list` and `diagnose` read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.files import file_age_s, write_although_full
from common.json_files import read_json_object
from common.processes import is_alive, start_time

STARTING, IMPORTING, LOADING = "starting", "importing", "loading data"
TRAINING, VALIDATING, SAVING = "training", "validating", "saving"
EVALUATING = "evaluating"  # after the last step: rank 0 waits for the last evaluation
DONE, FAILED, INTERRUPTED = "done", "failed", "interrupted"
ENDED = (DONE, FAILED, INTERRUPTED)
RETRYING = "retrying"  # of a run that has failed, and whose launcher may start it again
SILENT = "silent"  # of a run that has not ended and no longer writes its status
HEARTBEAT_S = 5.0  # between two writes of a rank
MOST_ERROR_TEXT = 2000  # characters
SILENT_AFTER_S = 60.0  # without a write: more than an overloaded file system takes


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a rank: its step, its phase, and when it wrote this and when it ended a step."""

    rank: int
    host: str = ""
    phase: str = ""
    step: int = 0
    time: float = 0.0
    step_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended.

    Args:
        time: unix seconds.
        exit_code: the run's; 0, 130 after an interrupt, else of the first failing rank.
        rank, host: the rank that failed first, where it is known.
        signal: the signal that ended that rank, such as SIGKILL, where it is known.
        error: the end of what that rank said; logs/attempt-N/rank-R.json has the whole text.
        cause: a name from watch/known_failures.py, or "" if the failure is unknown or was not diagnosed.
        summary: the cause in one line.
        advice: what to do.
        can_retry: whether the same command can succeed when it is started again; None where it is unknown.
    """

    time: float = field(default_factory=time.time)
    exit_code: int = 0
    rank: int | None = None
    host: str = ""
    signal: str = ""
    error: str = ""
    cause: str = ""
    summary: str = ""
    advice: str = ""
    can_retry: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One state of a run. Times in unix seconds, durations in seconds, loss in nats per token.

    Args:
        phase: one of the phases of this module.
        executor: who starts the ranks.
        attempt: counted from 1; each start or resume is one.
        host, pid, pid_started: of the process that wrote this last; when it was started, as in common/processes.py.
        started, updated: start of the attempt; last write.
        step, max_steps: optimizer steps done, and in all.
        step_time: when the last step ended on rank 0; 0 before the first one.
        ends_by: when trainer.max_time ends the training (unix seconds); None without it.
        loss, lr, step_seconds, tokens_per_second: of the newest line of metrics.jsonl.
        checkpoint, checkpoint_time: the newest complete checkpoint (its folder's name) and when it was written.
        ranks: one heartbeat per rank.
        ending: of an ended attempt.
    """

    phase: str = STARTING
    executor: str = ""
    attempt: int = 1
    world_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    pid_started: int | None = field(default_factory=start_time)
    started: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    step: int = 0
    max_steps: int = 0
    step_time: float = 0.0
    ends_by: float | None = None
    loss: float | None = None
    lr: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    checkpoint: str = ""
    checkpoint_time: float | None = None
    ranks: tuple[Heartbeat, ...] = ()
    ending: Ending | None = None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the last step at the present rate, or until `trainer.max_time` is over if that comes first.

        None before a rate is known and after the end.
        """
        if self.step_seconds is None or self.phase in ENDED:
            return None
        left_s = None if self.ends_by is None else self.ends_by - self.updated
        return seconds_to_go(self.max_steps - self.step, self.step_seconds, left_s)

    def state(self, now: float) -> str:
        """The phase, or `silent` if nothing has been written for a minute although the run has not ended.

        `now` is to be taken from `read_clock`, since the run may be on another machine.

        While a run is starting it may wait in a queue for days, so only the launcher's process can be looked at.
        """
        if self.phase in ENDED:
            return self.phase
        if self.phase == STARTING:
            gone = self.host == socket.gethostname() and not is_alive(self.pid, self.pid_started)
            return SILENT if gone and self.executor not in ("slurm", "k8s") else self.phase
        return SILENT if now - self.updated > SILENT_AFTER_S else self.phase

    def to_json(self) -> str:
        """The text of status.json: the fields, and `eta_seconds` and `checkpoint_age_seconds` for other programs."""
        row = dataclasses.asdict(self)
        age = self.updated - self.checkpoint_time if self.checkpoint_time else None
        loss = self.loss if self.loss is not None and math.isfinite(self.loss) else None  # NaN is not JSON
        row.update(loss=loss, eta_seconds=self.eta_seconds, checkpoint_age_seconds=age)
        return json.dumps(row, indent=1) + "\n"

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> RunStatus:
        """From the parsed file; keys of other versions are left out, missing ones have their defaults."""
        known = {"pid_started": None, **_known_fields(cls, row)}
        ranks = row.get("ranks")
        known["ranks"] = tuple(
            Heartbeat(**_known_fields(Heartbeat, one))
            for one in (ranks if isinstance(ranks, list) else [])
            if isinstance(one, dict) and isinstance(one.get("rank"), int)
        )
        ending = row.get("ending")
        known["ending"] = Ending(**_known_fields(Ending, ending)) if isinstance(ending, dict) else None
        return cls(**known)

    def write(self, path: Path) -> None:
        """Write status.json in one step."""
        ended = self.phase in ENDED
        write_although_full(path, self.to_json(), sync=ended)


def read_status(path: Path) -> RunStatus | None:
    """The status in a file; None if there is none."""
    row = read_json_object(path)
    return RunStatus.from_row(row) if row is not None else None


def seconds_to_go(steps: int, step_seconds: float, left_s: float | None) -> float:
    """Seconds until the end of a training.

    Args:
        steps: that are left.
        step_seconds: of one, at the present rate.
        left_s: seconds until `trainer.max_time` ends it; None without that.
    """
    steps_s = max(0, steps) * step_seconds
    return steps_s if left_s is None else min(steps_s, max(0.0, left_s))


def read_clock(path: Path) -> float:
    """The present, in unix seconds, by the clock of the machine that writes this status.json.

    From the time that it has written and the age of the file; this machine's clock where there is no such file.
    """
    status = read_status(path)
    try:
        return status.updated + file_age_s(path) if status is not None else time.time()
    except OSError:
        return time.time()


def _known_fields(kind: type[Any], row: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in row.items() if name in names}
