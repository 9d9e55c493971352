"""The attempts at a run: where each began and ended, why, and how many steps were lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common import rank_states, run_status
from common.run_status import Ending, RunStatus, read_status
from common.rundir import RunDir, checkpoint_step


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Args:
        number: from 1.
        first, last: the step it continued from, and the last one that it ended.
        state: done, failed, interrupted, running; `no end recorded` of one that was killed with its launcher.
        why: the reason of a failure, in one line.
        lost: steps that the next attempt had to train again; None for the last attempt.
    """

    number: int
    first: int
    last: int
    state: str
    why: str
    lost: int | None


def read_attempts(run: RunDir) -> list[Attempt]:
    """All attempts, the first one first."""
    folders = run.attempts
    starts = [_start(folder) for folder in folders]
    newest = read_status(run.status)
    found = []
    for index, folder in enumerate(folders):
        number = int(folder.name.split("-")[1])
        status = newest if newest is not None and newest.attempt == number else read_status(folder / "status.json")
        ranks = rank_states.read(folder)
        last = max([status.step if status else 0, starts[index], *(state.step for state in ranks)])
        following = starts[index + 1] if index + 1 < len(folders) else None
        ending = (status.ending if status else None) or Ending()
        found.append(
            Attempt(
                number=number,
                first=starts[index],
                last=last,
                state=_state(status, ranks, is_last=following is None),
                why=ending.summary,
                lost=None if following is None else max(0, last - following),
            )
        )
    return found


def _start(folder: Path) -> int:
    """The step of the checkpoint that the ranks agreed on (launcher/rank_main.py)."""
    try:
        words = (folder / "resume-from").read_text().split()
        return checkpoint_step(Path(words[1])) if len(words) > 1 else 0
    except (OSError, ValueError, IndexError):
        return 0


def _state(status: RunStatus | None, ranks: list[rank_states.RankState], *, is_last: bool) -> str:
    if status is not None and status.phase in run_status.ENDED:
        return status.phase
    ended = [state.state for state in ranks if state.state != rank_states.RUNNING]
    if ended:
        return rank_states.FAILED if rank_states.FAILED in ended else ended[0]
    return "running" if is_last else "no end recorded"
