"""The doctor's checks without torch: what this machine is, against what a run needs."""

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

GIB = 2**30
CHECKPOINTS = 21 * GIB  # three of Qwen2.5-0.5B: two kept and one in the making
# distribution: versions that this project runs with, and whether another one stops a run. As in pyproject.toml.
SUPPORTED = {
    "torch": (">=2.6", True),
    "nemo_toolkit": (">=2.3,<2.4", True),
    "megatron-core": (">=0.12,<0.14", True),
    "nemo_run": ("==0.4.0", False),
    "lightning": ("==2.4.0", False),
    "transformers": (">=4.51,<4.52", False),
}
TRANSFORMER_ENGINE = ">=2.11"
PORT, PORTS = 29500, 10


@dataclass(frozen=True)
class Check:
    """One look at the machine: ok, warning (a run may suffer) or error (a run of that kind fails)."""

    name: str
    level: Literal["ok", "warning", "error"]
    found: str
    do: str = ""


def checks(devices: int | None) -> Iterator[Check]:
    """All of them, in order.

    Args:
        devices: GPUs (or, without any, CPU ranks) that a run is to have; None where nobody said.
    """
    cards = machine_facts.query_gpus()
    yield from _gpus(cards, devices)
    yield from _versions(cards)
    parts: list[Callable[[], Iterator[Check]]] = [_shared_memory, _port, _host, _limits, _disk, _container]
    for part in parts:
        yield from part()


def _gpus(cards: machine_facts.Gpus, devices: int | None) -> Iterator[Check]:
    nodes = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if cards.problem and nodes:
        yield Check("driver", "error", f"{nodes} device file(s), but {cards.problem}", "reinstall or reload the driver")
        return
    if not cards.installed:
        level: Literal["ok", "error"] = "ok" if devices is None else "error"
        yield Check("GPU", level, f"none ({cards.problem or 'NVML finds none'}): CPU recipes only", _how_to_gpus())
        return
    yield Check("driver", "ok", f"{cards.driver}, runs CUDA up to {cards.cuda // 1000}.{cards.cuda % 1000 // 10}")
    for card in cards.installed:
        used = f", used by {card.processes} process(es)" if card.processes else ""
        text = f"{card.name}, {card.free / GIB:.1f} of {card.total / GIB:.1f} GiB free{used}"
        full = card.free < 20e9
        yield Check(
            f"GPU {card.index}",
            "warning" if full else "ok",
            text,
            "20 GB free are advised for the 0.5B model: nvidia-smi shows who uses it" if full else "",
        )
    hidden = len(cards.installed) - len(cards.visible)
    if hidden or (devices or 0) > len(cards.visible):
        few = len(cards.visible) < (devices or 1)
        value = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = f"{len(cards.visible)} of {len(cards.installed)} GPU(s) (CUDA_VISIBLE_DEVICES={value!r})"
        yield Check(
            "visible", "error" if few else "ok", found, "unset CUDA_VISIBLE_DEVICES, or --devices" if few else ""
        )


def _how_to_gpus() -> str:
    return "in a container: docker run --gpus all" if _in_container() else ""


def _versions(cards: machine_facts.Gpus) -> Iterator[Check]:
    for name, (wanted, needed) in SUPPORTED.items():
        found = _version(name)
        if found is None:
            yield Check(name, "error", "not installed", "make setup, or NVIDIA's container nemo:25.04")
        elif not SpecifierSet(wanted).contains(found.split("+")[0], prereleases=True):
            yield Check(name, "error" if needed else "warning", f"{found}, tested with {wanted}", "make setup")
        else:
            yield Check(name, "ok", found + (_cuda_of_torch(cards) if name == "torch" else ""))
    if cards.installed and _cuda_of_torch(cards).endswith("(CPU only)"):
        yield Check("torch's CUDA", "error", "a CPU build on a machine with a GPU", "install torch with CUDA")
    if problem := _too_new(cards):
        yield Check("torch's CUDA", "error", problem, "a newer driver, or a torch built for an older CUDA")
    found = _version("transformer_engine")
    if found is None and cards.installed:
        text = "not installed: local layers with SDPA attention, slower, no distributed optimizer"
        yield Check("transformer_engine", "warning", text, "pip install transformer_engine[pytorch]")
    elif found is not None and not SpecifierSet(TRANSFORMER_ENGINE).contains(found.split("+")[0], prereleases=True):
        text = f"{found}: before 2.11 its fused cross-entropy gives wrong gradients with masks"
        yield Check("transformer_engine", "warning", text, f"transformer_engine{TRANSFORMER_ENGINE}")
    elif found is not None:
        yield Check("transformer_engine", "ok", found)


def _version(name: str) -> str | None:
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


def _cuda_of_torch(cards: machine_facts.Gpus) -> str:
    cuda = _torch_cuda()
    return f", CUDA {cuda}" if cuda else " (CPU only)"


def _too_new(cards: machine_facts.Gpus) -> str:
    """A driver runs every CUDA of its own major version (minor version compatibility), and older ones."""
    cuda = _torch_cuda()
    if not cuda or not cards.cuda or int(cuda.split(".")[0]) <= cards.cuda // 1000:
        return ""
    return f"torch is built for CUDA {cuda}, driver {cards.driver} runs up to {cards.cuda // 1000}"


def _shared_memory() -> Iterator[Check]:
    shm = machine_facts.shared_memory()
    size = f"{shm.free / 2**20:,.1f} of {shm.total / 2**20:,.1f} MiB free"
    mend = "docker run --ipc=host (or --shm-size=8g); mount -o remount,size=8g /dev/shm; else --env nccl-no-shm"
    if shm.problem:
        text = f"{machine_facts.SHM_FOLDER} cannot be written: {shm.problem} ({size})"
        yield Check("shared memory", "error", text, mend)
    elif shm.free < machine_facts.SHM_MINIMUM:
        yield Check("shared memory", "error", size + ": NCCL and data loaders need 64 MiB and more", mend)
    elif shm.free < machine_facts.SHM_RECOMMENDED:
        yield Check("shared memory", "warning", size + ": NCCL may need up to 1 GiB", mend)
    else:
        yield Check("shared memory", "ok", size)


def _port() -> Iterator[Check]:
    named = os.environ.get("MASTER_PORT", "")
    if named and not (named.isdigit() and 0 < int(named) < 65536):
        yield Check("port", "error", f"MASTER_PORT={named!r} is no port", "unset MASTER_PORT")
        return
    first = int(named or PORT)
    free = [port for port in range(first, min(first + PORTS, 65536)) if machine_facts.port_is_free(port)]
    if free[:1] == [first]:
        yield Check("port", "ok", f"{first} is free")
    elif free and not named:
        yield Check("port", "ok", f"{first} is taken; {free[0]} is free and would be used")
    elif free:
        do = f"unset MASTER_PORT, or MASTER_PORT={free[0]}, which is free"
        yield Check("port", "error", f"MASTER_PORT={first} is taken", do)
    else:
        do = "MASTER_PORT=ANOTHER (`ss -ltnp` shows who listens)"
        yield Check("port", "error", f"all of {first} to {first + PORTS - 1} are taken", do)


def _host() -> Iterator[Check]:
    name = socket.gethostname()
    address, problem = machine_facts.resolve_host(name)
    mend = f"a line '127.0.1.1 {name}' in /etc/hosts; on one machine MASTER_ADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo"
    if problem:
        yield Check("host name", "error", f"{name!r} does not resolve: {problem}", mend)
    elif not machine_facts.is_local_address(address):
        yield Check("host name", "error", f"{name!r} is {address}, which no interface here has", mend)
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
    marks = ("docker", "containerd", "kubepods", "libpod")
    return any(mark in Path("/proc/1/cgroup").read_text() for mark in marks)


def _container() -> Iterator[Check]:
    if not _in_container():
        return
    default = machine_facts.shared_memory().total == machine_facts.SHM_MINIMUM
    text = "yes, with docker's default 64 MiB of shared memory" if default else "yes"
    do = "docker run --gpus all --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 ..."
    yield Check("container", "warning" if default else "ok", text, do if default else "")
