"""Facts about this machine, read without torch: GPUs, shared memory, ports, host names."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from common.errors import UserError

SHM_FOLDER = Path("/dev/shm")
SHM_MINIMUM = 64 * 2**20  # bytes: Docker's default, which NCCL outgrows
SHM_RECOMMENDED = 2**30  # bytes: more than NCCL needs on one machine
MASTER_PORT, PORTS_TRIED = 29500, 10  # torch.distributed's default, and how many are looked at from there
_T = TypeVar("_T")


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML sees it; memory in bytes."""

    index: int
    name: str
    total: int
    free: int
    uuid: str
    processes: int


@dataclass(frozen=True)
class Gpus:
    """All GPUs of this machine, those that CUDA_VISIBLE_DEVICES leaves visible, and why there are none."""

    installed: tuple[Gpu, ...] = ()
    visible: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: int = 0  # newest CUDA version that the driver supports; 12040 is 12.4
    problem: str = ""


def query_gpus(environ: Mapping[str, str] = os.environ) -> Gpus:
    """Read the GPUs from the driver through NVML; `problem` says why NVML does not answer."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return Gpus(problem=str(problem))
    try:
        installed = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        driver, cuda = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlSystemGetCudaDriverVersion())
    except nvml.NVMLError as problem:
        return Gpus(problem=str(problem))
    finally:
        nvml.nvmlShutdown()
    return Gpus(installed, visible_gpus(installed, environ.get("CUDA_VISIBLE_DEVICES")), driver, cuda)


def _gpu(nvml: object, index: int) -> Gpu:
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
    return Gpu(index, name, int(memory.total), int(memory.free), uuid, running)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # nvidia-ml-py before 12 gave bytes


def visible_gpus(installed: tuple[Gpu, ...], cuda_visible_devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible: indices or UUID prefixes, up to the first unknown one."""
    if cuda_visible_devices is None:
        return installed
    found: list[Gpu] = []
    for word in (word.strip() for word in cuda_visible_devices.split(",")):
        matches = [gpu for gpu in installed if word == str(gpu.index) or (word and gpu.uuid.startswith(word))]
        if not matches:
            break
        found.append(matches[0])
    return tuple(found)


@dataclass(frozen=True)
class SharedMemory:
    """The shared-memory file system: total and free bytes, and why it cannot be written (empty if it can)."""

    total: int
    free: int
    problem: str = ""


def shared_memory(path: Path = SHM_FOLDER) -> SharedMemory:
    """Read the size of /dev/shm and try to write a file there."""
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
    """Whether no process of this machine listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_ports(first: int = MASTER_PORT) -> list[int]:
    """The ports from `first` on that no process of this machine listens on, of `PORTS_TRIED`."""
    return [port for port in range(first, min(first + PORTS_TRIED, 65536)) if port_is_free(port)]


def find_free_port(tries: int = PORTS_TRIED, first: int = MASTER_PORT) -> int:
    """The first of the ports `first` to `first + tries - 1` on which nothing listens on this machine.

    Raises:
        UserError: all of them are in use.
    """
    port = next(filter(port_is_free, range(first, first + tries)), None)
    if port is None:
        raise UserError(
            f"no free port between {first} and {first + tries - 1}",
            expected="a port on which rank 0 can listen",
            found=f"{tries} ports in use (`ss -ltnp` shows by which process)",
            do="set MASTER_PORT to a free one",
        )
    return port


def resolve_host(name: str, limit_s: float = 5.0) -> tuple[str, str]:
    """Resolve a host name, for at most `limit_s` seconds.

    Returns:
        (address, ""), or ("", the reason why it does not resolve).
    """
    try:
        found = call_with_timeout(limit_s, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except TimeoutError:
        return "", f"no answer within {limit_s:.0f} s"
    except OSError as problem:
        return "", str(problem)
    return str(found[0][4][0]), ""


def is_local_address(address: str) -> bool:
    """Whether a network interface of this machine has that address."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def call_with_timeout(limit_s: float, call: Callable[[], _T]) -> _T:
    """The result of `call`.

    Raises:
        TimeoutError: no result after `limit_s` seconds (the call itself goes on in its thread).
    """
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        return pool.submit(call).result(limit_s)
    except concurrent.futures.TimeoutError:
        raise TimeoutError from None
    finally:
        pool.shutdown(wait=False)
