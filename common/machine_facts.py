"""Facts about this machine, without torch: cards, shared memory, ports, the host's name."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

SHM = Path("/dev/shm")
SHM_LEAST, SHM_GOOD = 64 * 2**20, 2**30  # bytes: docker's default, which NCCL outgrows; what it never needs more than
_T = TypeVar("_T")


@dataclass(frozen=True)
class Card:
    """A GPU as NVML sees it; memory in bytes."""

    index: int
    name: str
    total: int
    free: int
    uuid: str
    processes: int


@dataclass(frozen=True)
class Cards:
    """All GPUs, those that CUDA_VISIBLE_DEVICES leaves visible, and why there are none."""

    every: tuple[Card, ...] = ()
    visible: tuple[Card, ...] = ()
    driver: str = ""
    cuda: int = 0  # newest CUDA version that the driver runs, as 12040
    problem: str = ""


def cards(environ: Mapping[str, str] = os.environ) -> Cards:
    """Ask NVML."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return Cards(problem=str(problem))
    try:
        every = tuple(_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        driver, cuda = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
    except nvml.NVMLError as problem:
        return Cards(problem=str(problem))
    finally:
        nvml.nvmlShutdown()
    return Cards(every, visible(every, environ.get("CUDA_VISIBLE_DEVICES")), driver, cuda)


def _card(nvml: object, index: int) -> Card:
    from pynvml import (
        nvmlDeviceGetComputeRunningProcesses,
        nvmlDeviceGetHandleByIndex,
        nvmlDeviceGetMemoryInfo,
        nvmlDeviceGetName,
        nvmlDeviceGetUUID,
    )

    handle = nvmlDeviceGetHandleByIndex(index)
    memory = nvmlDeviceGetMemoryInfo(handle)
    running = len(nvmlDeviceGetComputeRunningProcesses(handle))
    name, uuid = _text(nvmlDeviceGetName(handle)), _text(nvmlDeviceGetUUID(handle))
    return Card(index, name, int(memory.total), int(memory.free), uuid, running)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # nvidia-ml-py before 12 gave bytes


def visible(every: tuple[Card, ...], chosen: str | None) -> tuple[Card, ...]:
    """What CUDA leaves of the cards: numbers or UUID prefixes, up to the first that fits none."""
    if chosen is None:
        return every
    found: list[Card] = []
    for word in (word.strip() for word in chosen.split(",")):
        fits = [card for card in every if word == str(card.index) or (word and card.uuid.startswith(word))]
        if not fits:
            break
        found.append(fits[0])
    return tuple(found)


@dataclass(frozen=True)
class SharedMemory:
    """A memory file system: bytes in all and free, and what is wrong with writing there."""

    total: int
    free: int
    problem: str = ""


def shared_memory(path: Path = SHM) -> SharedMemory:
    """Size of /dev/shm, and whether a file can be made there."""
    try:
        stat = os.statvfs(path)
        total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    except OSError as problem:
        return SharedMemory(0, 0, problem.strerror or str(problem))
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            file.write(b"\0" * 4096)
    except OSError as problem:
        return SharedMemory(total, free, problem.strerror or str(problem))
    return SharedMemory(total, free)


def port_is_free(port: int) -> bool:
    """Nobody listens on `port` here."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def resolve(name: str, limit_s: float = 5.0) -> tuple[str, str]:
    """The address of a host name, or what is wrong; a name server that does not answer is not waited for."""
    try:
        found = within(limit_s, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        return "", f"no answer within {limit_s:.0f} s"
    except OSError as problem:
        return "", str(problem)
    return str(found[0][4][0]), ""


def is_ours(address: str) -> bool:
    """An interface of this machine has that address."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def within(limit_s: float, call: Callable[[], _T]) -> _T:
    """The call's result, or TimeoutError after `limit_s` seconds (the call itself cannot be stopped)."""
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(limit_s)
    except concurrent.futures.TimeoutError:
        raise TimeoutError from None
    finally:
        pool.shutdown(wait=False)
