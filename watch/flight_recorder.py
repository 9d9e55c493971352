"""Which collective the ranks are stuck in, from the dumps of torch's flight recorder.

torch (2.4 and later) keeps the last collectives of each rank and writes them, with TORCH_NCCL_DUMP_ON_TIMEOUT=1, as a
pickle of plain lists and dicts when one times out. They are read with an unpickler that knows no class, so that a file
from elsewhere runs nothing. Format: torch/csrc/distributed/c10d/FlightRecorder.hpp; keys `entries`, and in each entry
`process_group` (name, description), `collective_seq_id`, `profiling_name`, `state`, `is_p2p`.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.json_files import read_json_list, read_json_object
from common.rundir import RunDir

FILE_PREFIX = "nccl_trace_rank_"
_PREFIX_KEY = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_DONE = "completed"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a flight-recorder dump holds plain data, not {module}.{name}")


@dataclass(frozen=True)
class StuckCollective:
    """The first collective of a process group that not all ranks finished.

    Args:
        group, number, operation: such as `default_pg`, 123, `nccl:all_reduce`.
        waiting: ranks that entered it and did not leave.
        absent: ranks of the dumps that never came to it, or came to another operation.
    """

    group: str
    number: int
    operation: str
    waiting: tuple[int, ...]
    absent: tuple[int, ...]

    def __str__(self) -> str:
        waiting = ", ".join(map(str, self.waiting))
        text = f"{self.operation} number {self.number} of group {self.group}: rank {waiting} waited"
        if not self.absent:
            return text + ", and all ranks came to it"
        return text + f", rank {', '.join(map(str, self.absent))} did not come to it"


def find_dumps(run: RunDir, attempt: int, since: float) -> dict[int, Path]:
    """rank -> its dump: in the attempt's log folder, or where the environment of the run put it.

    Args:
        since: files last written before this Unix time belong to another run.
    """
    prefixes = [str(run.attempt(attempt) / FILE_PREFIX), f"/tmp/{FILE_PREFIX}"]
    prefixes += [row["value"] for row in read_json_list(run.env) if row.get("key") == _PREFIX_KEY]
    found: dict[int, Path] = {}
    for prefix in prefixes:
        for path in Path(prefix).parent.glob(Path(prefix).name + "*"):
            number = re.fullmatch(r"\d+", path.name[len(Path(prefix).name) :])
            if number and path.stat().st_mtime >= since:
                found.setdefault(int(number[0]), path)
    return found


def find_stuck_collective(dumps: dict[int, Path]) -> StuckCollective | None:
    """Compare the dumps; None if there are none, or if every collective ended on every rank."""
    ranks = {rank: entries for rank, path in dumps.items() if (entries := _read_entries(path)) is not None}
    groups = {_group(entry) for entries in ranks.values() for entry in entries}
    stuck = [found for group in sorted(groups) if (found := _stuck_in(group, ranks)) is not None]
    return max(stuck, key=lambda found: (bool(found.absent), len(found.waiting))) if stuck else None


def _read_entries(path: Path) -> list[dict[str, Any]] | None:
    value: Any = read_json_object(path)
    if value is None:
        try:
            with path.open("rb") as stream:
                value = _PlainUnpickler(stream).load()
        except (OSError, pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError):
            return None
    entries = value.get("entries") if isinstance(value, dict) else None
    if not isinstance(entries, list):
        return None
    return [entry for entry in entries if isinstance(entry, dict) and not entry.get("is_p2p")]


def _group(entry: dict[str, Any]) -> str:
    group = entry.get("process_group", "")
    return ":".join(map(str, group)) if isinstance(group, list | tuple) else str(group)


def _stuck_in(group: str, ranks: dict[int, list[dict[str, Any]]]) -> StuckCollective | None:
    """The lowest number of a collective of this group that some rank has entered and not left."""
    own = {
        rank: {int(e.get("collective_seq_id", -1)): e for e in entries if _group(e) == group}
        for rank, entries in ranks.items()
    }
    members = {rank: entries for rank, entries in own.items() if entries}
    open_numbers = [n for entries in members.values() for n, e in entries.items() if e.get("state") != _DONE]
    if not open_numbers:
        return None
    number = min(open_numbers)
    waiting = [rank for rank, entries in members.items() if _is_open(entries.get(number))]
    names = [str(members[rank][number].get("profiling_name", "?")) for rank in waiting]
    operation = max(names, key=names.count)
    same = [rank for rank, name in zip(waiting, names, strict=True) if name == operation]
    absent = [rank for rank, entries in members.items() if max(entries) < number or rank in set(waiting) - set(same)]
    return StuckCollective(group, number, operation, tuple(sorted(same)), tuple(sorted(absent)))


def _is_open(entry: dict[str, Any] | None) -> bool:
    return entry is not None and entry.get("state") != _DONE
