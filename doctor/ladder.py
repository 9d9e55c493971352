"""The ladder of ways for ranks to talk to each other on one machine, best first; which rung holds, and what it costs.

Each rung runs in processes of its own with a time limit: a collectives library that fails may also hang or crash.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common.environment.sets import BACKEND_KEY

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

GRADIENTS = 494_032_768 * 4  # bytes of Qwen2.5-0.5B's gradients in fp32, which data parallelism reduces each step
_LIMIT_S = (4.0, 15.0)  # of one rung, least and most


@dataclass(frozen=True)
class Rung:
    """A way to communicate.

    Args:
        env: what must be set for it, key -> (value, reason).
        layer: the environment set that has just this, if there is one.
    """

    name: str
    backend: Literal["nccl", "gloo"]
    device: Literal["cuda", "cpu"]
    world_size: int
    env: dict[str, tuple[str, str]] = field(default_factory=dict)
    layer: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a rung.

    Args:
        failed: the step that failed, or "" if the rung holds.
        why: the library's own words on the failure.
        found: step -> what it saw.
        seconds: bytes of a tensor -> seconds of its all-reduce.
    """

    rung: Rung
    failed: str = ""
    why: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def bandwidth(self) -> dict[int, float]:
        """Bytes of the tensor -> bus bandwidth in GB/s (1e9): each rank's link carries 2(n-1)/n of the tensor."""
        world = self.rung.world_size
        if world < 2:  # one rank has nobody to talk to
            return {}
        return {size: 2 * (world - 1) / world * size / seconds / 1e9 for size, seconds in self.seconds.items()}

    @property
    def step_s(self) -> float | None:
        """Seconds to reduce the gradients of Qwen2.5-0.5B once, at the largest size's bandwidth, nothing overlapped."""
        if self.rung.world_size < 2 or not self.seconds:
            return None
        size = max(self.seconds)
        return self.seconds[size] * GRADIENTS / size


STEPS = ("device", "init", "all_reduce", "model", "bandwidth")


@dataclass(frozen=True)
class Task:
    """What every rank of a rung does.

    Args:
        env: set before anything is initialised.
        sizes: bytes of the tensors whose all-reduce is timed.
        timeout_s: after this a collective that waits gives up in its own words.
        folder: rank-R.jsonl and rank-R.log are written here, and the port where rank 0 listens.
    """

    backend: Literal["nccl", "gloo"]
    device: Literal["cuda", "cpu"]
    world_size: int
    env: dict[str, str]
    sizes: tuple[int, ...]
    timeout_s: float
    folder: Path


_P2P = {"NCCL_P2P_DISABLE": ("1", "GPUs cannot reach each other's memory: through the host's instead")}
_SHM = {"NCCL_SHM_DISABLE": ("1", "NCCL cannot use /dev/shm: without it")}
_LO = {
    "NCCL_SOCKET_IFNAME": ("lo", "NCCL finds no other usable interface; one machine only"),
    "GLOO_SOCKET_IFNAME": ("lo", "the host name leads to no usable interface; one machine only"),
}
_GLOO = {BACKEND_KEY: ("gloo", "NCCL does not work here: TCP, no distributed optimizer; a diagnostic")}


def rungs(gpus: int, ranks: int) -> list[Rung]:
    """The ladder for `ranks` ranks on a machine with `gpus` GPUs, best first."""
    if gpus == 0:
        lo = {"GLOO_SOCKET_IFNAME": _LO["GLOO_SOCKET_IFNAME"]}
        many = [Rung(f"Gloo, {ranks} CPU ranks", "gloo", "cpu", ranks)] if ranks > 1 else []
        many += [Rung("Gloo on the loopback interface", "gloo", "cpu", ranks, lo)] if ranks > 1 else []
        return [*many, Rung("one CPU rank", "gloo", "cpu", 1), Rung("one CPU rank, loopback", "gloo", "cpu", 1, lo)]
    single = [
        Rung("one GPU", "nccl", "cuda", 1),
        Rung("one GPU, loopback", "nccl", "cuda", 1, _LO),
        Rung("one GPU, Gloo", "gloo", "cuda", 1, _GLOO, "gloo"),
    ]
    if ranks == 1:
        return single
    return [
        Rung(f"NCCL, {ranks} GPUs", "nccl", "cuda", ranks),
        Rung("NCCL, P2P off", "nccl", "cuda", ranks, _P2P),
        Rung("NCCL, SHM off", "nccl", "cuda", ranks, _SHM, "nccl-no-shm"),
        Rung("NCCL, P2P and SHM off", "nccl", "cuda", ranks, _P2P | _SHM),
        Rung("NCCL, loopback", "nccl", "cuda", ranks, _LO),
        Rung("Gloo", "gloo", "cuda", ranks, _GLOO, "gloo"),
        single[0],
    ]


def climb(ladder: list[Rung], budget_s: float, *, every: bool = False, mib: tuple[float, ...] = ()) -> Iterator[Result]:
    """Try the rungs from the best down, to the first that holds or (`every`) to the last.

    Args:
        budget_s: seconds for all of them together.
        mib: sizes to time; default 256 MiB on GPUs, 16 MiB on CPUs.
    """
    end = time.monotonic() + budget_s
    if problem := _warm(min(30.0, budget_s / 2)):
        yield Result(ladder[0], "torch", problem)
        return
    for index, rung in enumerate(ladder):
        left = (end - time.monotonic()) / (len(ladder) - index)
        result = attempt(rung, max(_LIMIT_S[0], min(_LIMIT_S[1], left)), mib)
        yield result
        if not every and not result.failed:
            return


def attempt(rung: Rung, limit_s: float, mib: tuple[float, ...] = ()) -> Result:
    """Run one rung to its end or its time limit (s)."""
    sizes = tuple(int(size * 2**20) for size in mib or ((256.0,) if rung.device == "cuda" else (16.0,)))
    with tempfile.TemporaryDirectory(prefix="ladder-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env = {"NCCL_DEBUG": "WARN", **{key: value for key, (value, _) in rung.env.items()}}
        task = Task(
            rung.backend,
            rung.device,
            rung.world_size,
            env,
            sizes,
            max(2.0, limit_s - 2),
            folder,
        )
        start = time.monotonic()
        ranks = [_context().Process(target=_enter, args=(task, rank)) for rank in range(rung.world_size)]
        for process in ranks:
            process.start()
        _wait(ranks, start + limit_s)
        return _read(rung, folder, time.monotonic() - start, limit_s)


def _enter(task: Task | None = None, rank: int = 0) -> None:
    """In the child: torch stays out of the parent. Without a task it only waits for the imports."""
    from doctor import ladder_rank as ladder_child

    if task is not None:
        ladder_child.main(task, rank)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # not ours: the server has another sys.path (Python < 3.12)
    return context


def _warm(limit_s: float) -> str:
    """Wait until torch is imported; returns what is wrong, or ""."""
    process = _context().Process(target=_enter)
    try:
        process.start()
        process.join(limit_s)
    except (EOFError, OSError) as problem:
        return f"the process that imports torch died: {problem}"
    if process.exitcode is None:
        process.kill()
        return f"torch was not imported within {limit_s:.0f} s"
    return "" if process.exitcode == 0 else f"importing torch ended with exit code {process.exitcode}"


def _wait(ranks: list[ForkServerProcess], end: float) -> None:
    """Until all are done, or `end`; two seconds after the first failure the others are not waited for."""
    while any(process.exitcode is None for process in ranks) and time.monotonic() < end:
        if any(process.exitcode for process in ranks):
            end = min(end, time.monotonic() + 2)
        time.sleep(0.02)
    for process in ranks:
        with suppress(OSError):
            process.kill()
        process.join()


def _read(rung: Rung, folder: Path, wall_s: float, limit_s: float) -> Result:
    """The ranks' notes and logs as one result."""
    notes = [_notes(folder / f"rank-{rank}.jsonl") for rank in range(rung.world_size)]
    logs = [_text(folder / f"rank-{rank}.log") for rank in range(rung.world_size)]
    found = {row["step"]: row["found"] for row in notes[0] if "found" in row}
    for rank, rows in enumerate(notes):
        if rows and "error" in rows[-1]:
            return Result(rung, rows[-1]["step"], _words(logs[rank], rows[-1]["error"]), found, wall_s=wall_s)
    if stuck := [rank for rank, rows in enumerate(notes) if len(rows) < len(STEPS)]:
        step = STEPS[len(notes[stuck[0]])]
        told = f"rank {stuck[0]} gave no answer within {limit_s:.0f} s" if wall_s >= limit_s else "a rank was killed"
        return Result(rung, step, _words(logs[stuck[0]], told), found, wall_s=wall_s)
    seconds = {int(size): value for size, value in found["bandwidth"].items()}
    return Result(rung, "", "", found, seconds, wall_s)


def _notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(path).splitlines() if line.endswith("}")]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _words(log: str, error: str) -> str:
    """What the library said: NCCL's warnings, else the end of the exception."""
    warnings = [match[1].strip() for match in re.finditer(r"NCCL WARN (.*)", log)]
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = warnings[:2] or ([lines[0], lines[-1]] if len(lines) > 1 else lines)
    short = [re.sub(r"/\S+/(\w+\.\w+:\d+)", r"\1", line) for line in said]  # without the builder's folders
    return " | ".join(dict.fromkeys(short))[:600]
