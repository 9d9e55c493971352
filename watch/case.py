"""What one diagnosis looks at: the records of a run, its logs, the kernel's messages and torch's dumps."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common import rank_states, run_status
from common.rank_states import RankState
from watch import log_files
from watch.flight_recorder import StuckCollective, find_dumps, find_stuck_collective
from watch.kernel_log import KernelMessage, read_kernel_messages
from watch.known_failures import find_known
from watch.log_files import LogFile
from watch.records import Records


@dataclass(frozen=True)
class Case:
    """Everything that one diagnosis looks at.

    Args:
        failed: failed ranks, the first to fail first; those that only lost a peer stand behind the others.
        lost: ranks that ended without writing how (killed), or that never wrote anything.
    """

    records: Records
    logs: list[LogFile]
    kernel: list[KernelMessage]
    stuck: StuckCollective | None
    failed: list[RankState]
    lost: list[int]
    now: float


def open_case(records: Records, kernel: Sequence[KernelMessage] | None, now: float, *, has_ended: bool) -> Case:
    """Read what the diagnosis of a run needs.

    Args:
        kernel: the kernel's messages; None reads those of this machine, if a rank of the run was on it.
        now: Unix time.
        has_ended: all ranks have ended, whatever status.json says: a rank that is still `running` was killed.
    """
    status = records.status
    ended = has_ended or status.state(now) in (*run_status.ENDED, run_status.SILENT)
    if kernel is None:
        kernel = _kernel_of_this_run(records)
    failed = sorted((s for s in records.ranks if s.state == rank_states.FAILED), key=lambda s: s.time)
    failed.sort(key=_has_consequence)
    known = {state.rank for state in records.ranks}
    lost = [s.rank for s in records.ranks if s.state == rank_states.RUNNING and ended]
    lost += [rank for rank in range(status.world_size) if rank not in known and known]
    logs = log_files.read_logs(records.run, status.attempt, since=status.started)
    dumps = find_dumps(records.run, status.attempt, since=max(status.started, 1.0))
    return Case(records, logs, list(kernel), find_stuck_collective(dumps), failed, lost, now)


def _kernel_of_this_run(records: Records) -> list[KernelMessage]:
    """This machine's messages from the start of the attempt to a minute after its end, if a rank ran here."""
    status = records.status
    if socket.gethostname() not in {state.host for state in records.ranks}:
        return []
    end = status.updated + 60 if status.phase in run_status.ENDED else time.time()
    return [message for message in read_kernel_messages() if status.started <= message.time <= end]


def _has_consequence(state: RankState) -> bool:
    match = find_known(state.error)
    return match is not None and match.failure.is_consequence
