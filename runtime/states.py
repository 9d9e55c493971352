"""What became of each rank: runs/NAME/logs/attempt-N/rank-R.json, written by the rank, read by its launcher."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

RUNNING, DONE, INTERRUPTED, FAILED = "running", "done", "interrupted", "failed"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's last word.

    Args:
        state: running (also of a rank that died without a word), done, interrupted or failed.
        time: unix seconds.
        error: what a failed rank has to say, whole.
    """

    rank: int
    state: str = RUNNING
    exit_code: int = 0
    error: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)

    def write(self, logs: Path) -> None:
        path = logs / f"rank-{self.rank}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)) + "\n")
        part.replace(path)


def read(logs: Path) -> list[RankState]:
    """All ranks that have said anything, in order."""
    found = [RankState(**json.loads(path.read_text())) for path in logs.glob("rank-*.json")]
    return sorted(found, key=lambda state: state.rank)


def first_failure(states: list[RankState]) -> RankState | None:
    """The rank that failed first: the others fail because it is gone."""
    failed = [state for state in states if state.state == FAILED]
    return min(failed, key=lambda state: state.time) if failed else None
