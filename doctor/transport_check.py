"""Test which transports work on this machine, and how fast they are.

Each test runs in processes of its own with a time limit, because a collectives library that fails may also hang or
crash. torch is imported in those processes only.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doctor.transports import STEPS, RankTask, Transport, TransportResult

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

_LIMIT_S = (4.0, 15.0)  # time limit of one transport: least, most


def check_transports(
    transports: list[Transport], budget_s: float, *, every: bool = False, mib: tuple[float, ...] = ()
) -> Iterator[TransportResult]:
    """Test the transports in order, up to the first that works.

    Args:
        budget_s: seconds for all of them together.
        every: test the remaining ones too.
        mib: tensor sizes to time, in MiB; default 256 on GPUs, 16 on CPUs.
    """
    end = time.monotonic() + budget_s
    if problem := import_torch(min(30.0, budget_s / 2)):
        yield TransportResult(transports[0], "torch", problem)
        return
    for index, transport in enumerate(transports):
        share = (end - time.monotonic()) / (len(transports) - index)
        result = check_transport(transport, max(_LIMIT_S[0], min(_LIMIT_S[1], share)), mib)
        yield result
        if not every and not result.failed:
            return


def check_transport(transport: Transport, limit_s: float, mib: tuple[float, ...] = ()) -> TransportResult:
    """Test one transport; after `limit_s` seconds its ranks are killed."""
    sizes = tuple(int(size * 2**20) for size in mib or ((256.0,) if transport.device == "cuda" else (16.0,)))
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as name:
        task = RankTask(
            backend=transport.backend,
            device=transport.device,
            world_size=transport.world_size,
            env={"NCCL_DEBUG": "WARN", **{key: value for key, (value, _) in transport.env.items()}},
            sizes=sizes,
            timeout_s=max(2.0, limit_s - 2),
            folder=Path(name),
        )
        start = time.monotonic()
        ranks = [_fork_server().Process(target=_run_rank, args=(task, rank)) for rank in range(task.world_size)]
        for process in ranks:
            process.start()
        _wait(ranks, start + limit_s)
        return _read_result(transport, task.folder, time.monotonic() - start, limit_s)


def import_torch(limit_s: float) -> str:
    """Wait until the server that forks the ranks has imported torch; returns what went wrong, or ""."""
    process = _fork_server().Process(target=_run_rank)
    try:
        process.start()
        process.join(limit_s)
    except (EOFError, OSError) as problem:
        return f"the process that imports torch died: {problem}"
    if process.exitcode is None:
        process.kill()
        return f"torch was not imported within {limit_s:.0f} s"
    return "" if process.exitcode == 0 else f"importing torch ended with exit code {process.exitcode}"


def _run_rank(task: RankTask | None = None, rank: int = 0) -> None:
    """In the child process, so that torch is not imported in the parent. Without a task only the imports are done."""
    from doctor import transport_rank

    if task is not None:
        transport_rank.main(task, rank)


def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # not transport_rank itself: before Python 3.12 the server does not have this process's sys.path
    context.set_forkserver_preload(["torch.distributed"])
    return context


def _wait(ranks: list[ForkServerProcess], end: float) -> None:
    """Wait until all ranks are done or `end` is reached, but at most two seconds after the first failure."""
    while any(process.exitcode is None for process in ranks) and time.monotonic() < end:
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + 2)
        time.sleep(0.02)
    for process in ranks:
        with suppress(OSError):
            process.kill()
        process.join()


def _read_result(transport: Transport, folder: Path, wall_s: float, limit_s: float) -> TransportResult:
    """Combine the records and logs of all ranks."""
    records = [_read_records(folder / f"rank-{rank}.jsonl") for rank in range(transport.world_size)]
    logs = [_read_text(folder / f"rank-{rank}.log") for rank in range(transport.world_size)]
    found = {row["step"]: row["found"] for row in records[0] if "found" in row}
    steps = {row["step"]: row["seconds"] for row in records[0] if "seconds" in row}
    for rank, rows in enumerate(records):
        if rows and "error" in rows[-1]:
            why = _summarize_error(logs[rank], rows[-1]["error"])
            return TransportResult(transport, rows[-1]["step"], why, found, step_seconds=steps, wall_s=wall_s)
    if unfinished := [rank for rank, rows in enumerate(records) if len(rows) < len(STEPS)]:
        rank, step = unfinished[0], STEPS[len(records[unfinished[0]])]
        error = f"rank {rank} did not answer within {limit_s:.0f} s" if wall_s >= limit_s else "a rank was killed"
        return TransportResult(
            transport, step, _summarize_error(logs[rank], error), found, step_seconds=steps, wall_s=wall_s
        )
    seconds = {int(size): value for size, value in found["bandwidth"].items()}
    return TransportResult(transport, "", "", found, seconds, steps, wall_s)


def _read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _read_text(path).splitlines() if line.endswith("}")]


def _read_text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _summarize_error(log: str, error: str) -> str:
    """NCCL's warnings where there are any, else the first and last line of the exception."""
    warnings = [match[1].strip() for match in re.finditer(r"NCCL WARN (.*)", log)]
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = warnings[:2] or ([lines[0], lines[-1]] if len(lines) > 1 else lines)
    short = [re.sub(r"/\S+/(\w+\.\w+:\d+)", r"\1", line) for line in said]  # without the folders of the build machine
    return " | ".join(dict.fromkeys(short))[:600]
