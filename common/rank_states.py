"""What became of each rank: runs/NAME/logs/attempt-N/rank-R.json, written by the rank, read by its launcher."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from common.errors import EXIT_INTERRUPTED, EXIT_RUN

log = logging.getLogger("launch")
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


# what a rank says when another one is gone
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "remote process exited",
    "is killed by signal: Terminated",  # its data worker, by the torchrun that ends the rest
)


def log_outcome(logs: Path, world_size: int, starter_log: Path | None = None) -> int:
    """Say what became of a run whose ranks have ended, the first failing rank's own error first.

    Returns:
        the run's exit code: 0, 130 after Ctrl-C, else that rank's.
    """
    known = {state.rank: state for state in read(logs)}
    failure = first_failure(list(known.values()))
    silent = [rank for rank in range(world_size) if rank not in known or known[rank].state == RUNNING]
    only_echo = failure is not None and any(text in failure.error for text in _LOST_PEER)
    if failure is not None and not (silent and only_echo):
        log.error("rank %d (%s) failed first:\n%s", failure.rank, failure.host, failure.error)
        _tell_the_rest(known, failure.rank, logs)
        return failure.exit_code
    if silent:
        log.error(
            "rank %s ended without a word: killed from outside (out of memory?) or crashed in a library\n%s",
            ", ".join(map(str, silent)),
            _tail(starter_log),
        )
        _tell_the_rest(known, None, logs)
        return EXIT_RUN
    return EXIT_INTERRUPTED if any(state.state == INTERRUPTED for state in known.values()) else 0


def _tell_the_rest(known: dict[int, RankState], but: int | None, logs: Path) -> None:
    for state in known.values():
        if state.state == FAILED and state.rank != but:
            log.error("rank %d then: %s", state.rank, state.error.strip().splitlines()[-1])
    log.error("logs: %s/rank-*.log", logs)


def _tail(path: Path | None, lines: int = 25) -> str:
    if path is None or not path.is_file():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
