"""The log files of an attempt, with the line numbers of what is found in them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common.rundir import RunDir

_LAST_BYTES = 2 * 2**20  # read of each file: an error stands at the end
_OWN_DIAGNOSIS = "diagnosis: "  # the launcher's lines, which quote causes
# what the first line of an error looks like, in Python, C++, NCCL, srun and the kernel's log
_ERROR_LINE = re.compile(
    r"^(?:\[rank\d+\]: ?)?(?:[\w.]+(?:Error|Exception|Interrupt|Failure)\b(?::|$)|Fatal Python error|terminate called)"
    r"|NCCL WARN |\bERROR\b|srun: error|slurmstepd: error",
    re.MULTILINE,
)


@dataclass(frozen=True)
class LogFile:
    """The end of one log file.

    Args:
        rank: whose log it is; None if it belongs to all ranks.
        first_line: number of the first line of `text` in the file, from 1.
    """

    path: Path
    text: str
    rank: int | None = None
    first_line: int = 1

    def line_at(self, position: int) -> tuple[int, str]:
        """The number in the file and the text of the line at a position of `text`."""
        start = self.text.rfind("\n", 0, position) + 1
        end = self.text.find("\n", position)
        return self.first_line + self.text.count("\n", 0, position), self.text[start : None if end < 0 else end]

    def find_line(self, line: str) -> int | None:
        """The number of the last line that contains `line`."""
        position = self.text.rfind(line) if line else -1
        return None if position < 0 else self.line_at(position)[0]

    def first_error(self) -> tuple[int, str] | None:
        """Number and text of the first line that looks like an error."""
        found = _ERROR_LINE.search(self.text)
        return self.line_at(found.start()) if found else None


def read_log(path: Path, rank: int | None = None) -> LogFile | None:
    """Read the end of a log file; None if it is absent or empty."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            skipped = stream.read(max(0, size - _LAST_BYTES)).count(b"\n")
            text = stream.read().decode(errors="replace")
    except OSError:
        return None
    if skipped and "\n" in text:  # the first line is cut
        text, skipped = text.split("\n", 1)[1], skipped + 1
    return LogFile(path, text, rank, skipped + 1) if text else None


def read_logs(run: RunDir, attempt: int, since: float = 0.0) -> list[LogFile]:
    """The logs of an attempt: of each rank, of what started the ranks, of the launcher and of the scheduler.

    Args:
        since: leave out files of the scheduler that were last written before this Unix time: of earlier attempts.
    """
    folder = run.attempt(attempt)
    found = [read_log(path, _rank_of(path)) for path in sorted(folder.glob("rank-*.log"), key=_rank_of)]
    found.append(read_log(folder / "rank.log", 0))  # standard error of the one rank of `direct`
    starters = [folder / "mpirun.log", *sorted(folder.glob("torchrun/**/stderr.log")), folder / "launcher.log"]
    schedulers = [*run.path.glob("slurm/log-*.out"), *run.path.glob("docker/log_*.out")]
    recent = sorted((path for path in schedulers if _written(path) >= since), key=_written)
    found += [read_log(path) for path in (*starters, *recent)]
    return [_without_diagnosis(log) for log in found if log is not None]


def _rank_of(path: Path) -> int:
    word = path.stem.partition("-")[2]
    return int(word) if word.isdigit() else -1


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _without_diagnosis(log: LogFile) -> LogFile:
    """The same with the launcher's own diagnosis blanked: it would be found as its own evidence."""
    if log.path.name != "launcher.log":
        return log
    lines = ("" if _OWN_DIAGNOSIS in line else line for line in log.text.split("\n"))
    return LogFile(log.path, "\n".join(lines), log.rank, log.first_line)


def in_order(logs: Iterable[LogFile], first: int | None) -> list[LogFile]:
    """The logs with those of rank `first` before the others, and the launcher's, which repeats others, last."""
    return sorted(logs, key=lambda log: (log.path.name == "launcher.log", log.rank != first, log.rank is None))
