"""The last recorded state of each rank: runs/NAME/logs/attempt-N/rank-R.json, written by the rank itself."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from common.errors import EXIT_INTERRUPTED, EXIT_RUN
from common.files import write_although_full
from common.json_files import read_json_object
from common.processes import describe_exit, is_alive, start_time
from common.run_status import Heartbeat

log = logging.getLogger("launch")
RUNNING, DONE, INTERRUPTED, FAILED = "running", "done", "interrupted", "failed"


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state that a rank has recorded.

    Args:
        state: running (also of a rank that was killed), done, interrupted or failed.
        error: the full error text of a failed rank.
        pid, pid_started: its process, and when that was started (common/processes.py).
        time: Unix time of the record in seconds; of a running rank the time of its newest heartbeat
        phase, step, step_time: as in common/run_status.py; step_time is 0 before the first step.
    """

    rank: int
    state: str = RUNNING
    exit_code: int = 0
    error: str = ""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    pid_started: int | None = field(default_factory=start_time)
    time: float = field(default_factory=time.time)
    phase: str = ""
    step: int = 0
    step_time: float = 0.0

    def write(self, logs: Path) -> None:
        """Write logs/rank-R.json in one step."""
        ended = self.state != RUNNING
        write_although_full(logs / f"rank-{self.rank}.json", json.dumps(asdict(self)) + "\n", sync=ended)

    def is_alive(self) -> bool:
        """Whether a rank that has not recorded its end still runs on this machine."""
        return self.state == RUNNING and self.host == socket.gethostname() and is_alive(self.pid, self.pid_started)

    def heartbeat(self) -> Heartbeat:
        """The same for status.json: the phase of a running rank, the state of an ended one."""
        phase = self.phase if self.state == RUNNING and self.phase else self.state
        return Heartbeat(self.rank, self.host, phase, self.step, self.time, self.step_time)


def read(logs: Path) -> list[RankState]:
    """The states of all ranks that have recorded one, in the order of their ranks."""
    names = {field.name for field in fields(RankState)}
    rows = [read_json_object(path) for path in logs.glob("rank-*.json")]
    rows = [{"pid_started": None, **row} for row in rows if row and "rank" in row]
    found = [RankState(**{k: v for k, v in row.items() if k in names}) for row in rows if row]
    return sorted(found, key=lambda state: state.rank)


def first_failure(states: list[RankState]) -> RankState | None:
    """The rank that failed first; the others usually fail because it is gone."""
    failed = [state for state in states if state.state == FAILED]
    return min(failed, key=lambda state: state.time) if failed else None


def wait_until_ended(logs: Path, limit_s: float = 600.0) -> None:
    """Wait for the ranks of this machine whose starter is gone; they save and stop. Kill those that do not end in time.

    Args:
        logs: the folder of the attempt, with the ranks' states.
    """
    end, logged = time.monotonic() + limit_s, False
    while alive := [state for state in read(logs) if state.is_alive()]:
        names = ", ".join(f"{state.rank} (process {state.pid})" for state in alive)
        if not logged:
            log.warning("what started the ranks is gone; waiting for rank %s to save and stop", names)
            logged = True
        if time.monotonic() > end:
            log.error("rank %s did not end within %.0f s: killed", names, limit_s)
            for state in alive:
                os.kill(state.pid, signal.SIGKILL)
            return
        time.sleep(0.5)


_FULL_BYTES = 1 << 20  # with less, a rank could not write its log
WITHOUT_ERROR = "ended without an error message"  # the signal follows where it is known; watch/cause.py reads it
_CRASH = "Fatal Python error: "  # faulthandler's first line; the stack of each thread follows
# what the error of a rank contains when it failed because another rank is gone
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "remote process exited",
    "is killed by signal: Terminated",  # its data loader worker, ended by torchrun with the remaining ranks
)


def log_outcome(
    logs: Path, world_size: int, starter_log: Path | None = None, exit_code: int | None = None, *, asked: bool = False
) -> int:
    """Log how a run ended whose ranks have all exited: the error of the first failed rank, then the others'.

    Args:
        logs: the folder of the attempt, with the ranks' states.
        starter_log: standard error of the program that started the ranks; its end is logged for a killed rank.
        exit_code: the exit code of the only rank where it is known, as subprocess gives it: a signal is negative.
        asked: the ranks were asked to stop, so that one without a recorded end was stopped before it could save.

    Returns:
        the exit code of the run: 0, 130 after Ctrl-C, else that of the first failed rank.
    """
    known = {state.rank: state for state in read(logs)}
    failure = first_failure(list(known.values()))
    killed = [rank for rank in range(world_size) if rank not in known or known[rank].state == RUNNING]
    lost_peer = failure is not None and any(text in failure.error for text in _LOST_PEER)
    if failure is not None and not (killed and lost_peer):
        log.error("rank %d (%s) failed first:\n%s", failure.rank, failure.host, failure.error)
        _log_later_failures(known, failure.rank, logs)
        return failure.exit_code
    if killed and asked:
        log.warning("rank %s was stopped before it could save", ", ".join(map(str, killed)))
        return EXIT_INTERRUPTED
    if killed:
        log.error(
            "rank %s %s: %s\n%s",
            ", ".join(map(str, killed)),
            WITHOUT_ERROR,
            _guess_why_killed(logs, exit_code),
            _read_last_lines(starter_log, logs / "console.log"),
        )
        _log_later_failures(known, None, logs)
        return EXIT_RUN
    return EXIT_INTERRUPTED if any(state.state == INTERRUPTED for state in known.values()) else 0


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _FULL_BYTES
    except OSError:  # there is no such folder: the ranks did not come that far
        return False


def _guess_why_killed(logs: Path, exit_code: int | None) -> str:
    full = f"; the disk of {logs} is full" if _is_full(logs) else ""
    if exit_code is not None:
        return describe_exit(exit_code) + full
    return f"killed from outside (out of memory?) or crashed in a library{full}"


def _log_later_failures(known: dict[int, RankState], first: int | None, logs: Path) -> None:
    for state in known.values():
        if state.state == FAILED and state.rank != first:
            log.error("rank %d failed later: %s", state.rank, state.error.strip().splitlines()[-1])
    log.error("logs: %s/rank-*.log", logs)


def _read_last_lines(path: Path | None, shown: Path, lines: int = 25) -> str:
    """The last lines of a log, without those that the console has shown, after the first line of a crash."""
    if path is None or not path.is_file():
        return ""
    known = set(shown.read_text(errors="replace").splitlines()) if shown.is_file() else set()
    found = path.read_text(errors="replace").splitlines()
    crash = [line for line in found[:-lines] if line.startswith(_CRASH)][-1:]
    return "\n".join(crash + [line for line in found[-lines:] if line not in known])
