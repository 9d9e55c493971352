"""Check without torch that this machine has what a run needs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.specifiers import SpecifierSet

from common import machine_facts
from common.quantities import GIB
from recipes.memory import ADVISED_BYTES

CHECKPOINTS = 21 * GIB  # three of Qwen2.5-0.5B: two that are kept and one that is being written
# distribution: supported versions (as in pyproject.toml), and whether another version is an error
SUPPORTED = {
    "torch": (">=2.6", True),
    "nemo_toolkit": (">=2.3,<2.4", True),
    "megatron-core": (">=0.12,<0.14", True),
    "nemo_run": ("==0.4.0", False),
    "lightning": ("==2.4.0", False),
    "transformers": (">=4.51,<4.52", False),
}
TRANSFORMER_ENGINE = ">=2.11"


@dataclass(frozen=True)
class Check:
    """The result of one check: ok, warning (a run may be slow or fail later) or error (such a run fails)."""

    name: str
    level: Literal["ok", "warning", "error"]
    found: str
    do: str = ""


def run_checks(devices: int | None) -> Iterator[Check]:
    """All checks, in order.

    Args:
        devices: GPUs (or, without any, CPU ranks) that a run is to have; None if not given.
    """
    gpus = machine_facts.query_gpus()
    yield from _gpus(gpus, devices)
    yield from _versions(gpus)
    others: list[Callable[[], Iterator[Check]]] = [_shared_memory, _port, _host, _limits, _disk, _container]
    for check in others:
        yield from check()


def _gpus(gpus: machine_facts.Gpus, devices: int | None) -> Iterator[Check]:
    nodes = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus.problem and nodes:
        yield Check("driver", "error", f"{nodes} device file(s), but {gpus.problem}", "reinstall or reload the driver")
        return
    if not gpus.installed:
        level: Literal["ok", "error"] = "ok" if devices is None else "error"
        yield Check("GPU", level, f"none ({gpus.problem or 'NVML finds none'}): CPU recipes only", _gpu_advice())
        return
    yield Check("driver", "ok", f"{gpus.driver}, runs CUDA up to {gpus.cuda // 1000}.{gpus.cuda % 1000 // 10}")
    for gpu in gpus.installed:
        used = f", used by {gpu.processes} process(es)" if gpu.processes else ""
        found = f"{gpu.name}, {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free{used}"
        full = gpu.free < ADVISED_BYTES
        advice = (
            f"{ADVISED_BYTES / 1e9:.0f} GB free are advised for the 0.5B model: nvidia-smi shows what uses the memory"
        )
        yield Check(f"GPU {gpu.index}", "warning" if full else "ok", found, advice if full else "")
    hidden = len(gpus.installed) - len(gpus.visible)
    if hidden or (devices or 0) > len(gpus.visible):
        few = len(gpus.visible) < (devices or 1)
        value = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = f"{len(gpus.visible)} of {len(gpus.installed)} GPU(s) (CUDA_VISIBLE_DEVICES={value!r})"
        do = f"unset CUDA_VISIBLE_DEVICES, or --devices {max(1, len(gpus.visible))}" if few else ""
        yield Check("visible", "error" if few else "ok", found, do)


def _gpu_advice() -> str:
    return "in a container: docker run --gpus all" if _in_container() else ""


def _versions(gpus: machine_facts.Gpus) -> Iterator[Check]:
    for name, (supported, required) in SUPPORTED.items():
        found = _find_version(name)
        if found is None:
            yield Check(name, "error", "not installed", "make setup, or NVIDIA's container nemo:25.04")
        elif not _is_supported(found, supported):
            yield Check(name, "error" if required else "warning", f"{found}, tested with {supported}", "make setup")
        else:
            yield Check(name, "ok", found + (_describe_torch_cuda() if name == "torch" else ""))
    if gpus.installed and _describe_torch_cuda().endswith("(CPU only)"):
        yield Check("torch's CUDA", "error", "a CPU build on a machine with a GPU", "install torch with CUDA")
    if problem := _driver_problem(gpus):
        yield Check("torch's CUDA", "error", problem, "a newer driver, or a torch built for an older CUDA")
    yield from _transformer_engine(gpus)


def _transformer_engine(gpus: machine_facts.Gpus) -> Iterator[Check]:
    name, found = "transformer_engine", _find_version("transformer_engine")
    install = f"pip install '{name}[pytorch]{TRANSFORMER_ENGINE}'"
    if found is None:
        if gpus.installed:
            text = "not installed: local layers with SDPA attention, slower, no distributed optimizer"
            yield Check(name, "warning", text, install)
    elif not _is_supported(found, TRANSFORMER_ENGINE):
        text = f"{found}: before 2.11 its fused cross-entropy gives wrong gradients with masks"
        yield Check(name, "warning", text, install)
    else:
        yield Check(name, "ok", found)


def _is_supported(version: str, supported: str) -> bool:
    return SpecifierSet(supported).contains(version.split("+")[0], prereleases=True)


def _find_version(name: str) -> str | None:
    for spelling in (name, name.replace("_", "-")):
        try:
            return importlib.metadata.version(spelling)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _torch_cuda() -> str | None:
    """The CUDA version that torch was built for, from its version file: torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = re.search(r"^cuda[^=]*= ['\"]([\d.]+)['\"]", file.read_text(), re.M) if file.is_file() else None
    return match[1] if match else None


def _describe_torch_cuda() -> str:
    cuda = _torch_cuda()
    return f", CUDA {cuda}" if cuda else " (CPU only)"


def _driver_problem(gpus: machine_facts.Gpus) -> str:
    """A driver runs every CUDA of its own major version (minor version compatibility) and of older ones."""
    cuda = _torch_cuda()
    if not cuda or not gpus.cuda or int(cuda.split(".")[0]) <= gpus.cuda // 1000:
        return ""
    return f"torch is built for CUDA {cuda}, driver {gpus.driver} runs up to {gpus.cuda // 1000}"


def _shared_memory() -> Iterator[Check]:
    shm = machine_facts.shared_memory()
    size = f"{shm.free / 2**20:,.1f} of {shm.total / 2**20:,.1f} MiB free"
    do = "docker run --ipc=host (or --shm-size=8g); mount -o remount,size=8g /dev/shm; else --env +nccl-no-shm"
    if shm.problem:
        text = f"{machine_facts.SHM_FOLDER} cannot be written: {shm.problem} ({size})"
        yield Check("shared memory", "error", text, do)
    elif shm.free < machine_facts.SHM_MINIMUM:
        yield Check("shared memory", "error", size + ": NCCL and data loaders need 64 MiB and more", do)
    elif shm.free < machine_facts.SHM_RECOMMENDED:
        yield Check("shared memory", "warning", size + ": NCCL may need up to 1 GiB", do)
    else:
        yield Check("shared memory", "ok", size)


def _port() -> Iterator[Check]:
    named = os.environ.get("MASTER_PORT", "")
    if named and not (named.isdigit() and 0 < int(named) < 65536):
        yield Check("port", "error", f"MASTER_PORT={named!r} is not a port number", "unset MASTER_PORT")
        return
    first = int(named or machine_facts.MASTER_PORT)
    free = machine_facts.free_ports(first)
    if free[:1] == [first]:
        yield Check("port", "ok", f"{first} is free")
    elif free and not named:
        yield Check("port", "ok", f"{first} is taken; {free[0]} is free and would be used")
    elif free:
        do = f"unset MASTER_PORT, or MASTER_PORT={free[0]}, which is free"
        yield Check("port", "error", f"MASTER_PORT={first} is taken", do)
    else:
        do = "MASTER_PORT=ANOTHER (`ss -ltnp` shows which process listens)"
        yield Check("port", "error", f"all of {first} to {first + machine_facts.PORTS_TRIED - 1} are taken", do)


def _host() -> Iterator[Check]:
    name = socket.gethostname()
    address, problem = machine_facts.resolve_host(name)
    do = f"a line '127.0.1.1 {name}' in /etc/hosts; on one machine MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo"
    if problem:
        yield Check("host name", "error", f"{name!r} does not resolve: {problem}", do)
    elif not machine_facts.is_local_address(address):
        yield Check("host name", "error", f"{name!r} is {address}, which no interface of this machine has", do)
    else:
        yield Check("host name", "ok", f"{name!r} is {address}")


def _limits() -> Iterator[Check]:
    rows = (
        ("memlock", resource.RLIMIT_MEMLOCK, 2**40, "RDMA pins its buffers; docker run --ulimit memlock=-1"),
        ("stack", resource.RLIMIT_STACK, 8 * 2**20, "docker run --ulimit stack=67108864"),
        ("open files", resource.RLIMIT_NOFILE, 4096, "ulimit -n 65536, or docker run --ulimit nofile=65536"),
    )
    for name, kind, least, do in rows:
        soft = resource.getrlimit(kind)[0]
        amount = f"{soft:,}" if kind == resource.RLIMIT_NOFILE else f"{soft / 2**20:,.0f} MiB"
        text = "unlimited" if soft == resource.RLIM_INFINITY else amount
        low = soft != resource.RLIM_INFINITY and soft < least
        yield Check(f"ulimit {name}", "warning" if low else "ok", text, do if low else "")


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free
    low = free < CHECKPOINTS
    text = f"{free / GIB:.1f} GiB free in this folder"
    yield Check("disk", "warning" if low else "ok", text, "21 GiB hold 3 checkpoints of the 0.5B model" if low else "")


def _in_container() -> bool:
    if any(Path(name).exists() for name in ("/.dockerenv", "/run/.containerenv")):
        return True
    names = ("docker", "containerd", "kubepods", "libpod")
    return any(name in Path("/proc/1/cgroup").read_text() for name in names)


def _container() -> Iterator[Check]:
    if not _in_container():
        return
    default = machine_facts.shared_memory().total == machine_facts.SHM_MINIMUM
    text = "yes, with docker's default 64 MiB of shared memory" if default else "yes"
    do = "docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 ..."
    yield Check("container", "warning" if default else "ok", text, do if default else "")
