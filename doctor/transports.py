"""The transports by which ranks on one machine can communicate, best first, and what each rank does to test one.

No torch: the list is read by the parent process, the tests run in processes of their own (doctor/transport_rank.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.environment.merge import Setting
from common.environment.sets import BACKEND_KEY
from common.environment.vccl import LIBRARY_KEY as VCCL_KEY
from recipes.qwen25 import QWEN25_500M

GRADIENT_BYTES = 4 * QWEN25_500M.num_parameters  # of Qwen2.5-0.5B in fp32, which data parallelism reduces each step
STEPS = ("device", "init", "all_reduce", "model", "bandwidth")  # of one rank's test, in order

_WITHOUT = {"NCCL_P2P_DISABLE": "no-p2p", "NCCL_SHM_DISABLE": "no-shm", "NCCL_SOCKET_IFNAME": "loopback"}

Backend = Literal["nccl", "gloo"]
Device = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class RankLayout:
    """Data-parallel ranks, for which an environment set is resolved (common/environment/merge.py)."""

    devices: int
    num_nodes: int = 1
    accelerator: str = "gpu"
    tensor_parallel: int = 1
    context_parallel: int = 1

    @property
    def data_parallel(self) -> int:
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Transport:
    """One way for ranks to communicate.

    Args:
        env: the environment variables it needs, key -> (value, reason).
        env_set: the environment set that sets exactly these, if there is one.
    """

    name: str
    backend: Backend
    device: Device
    world_size: int
    env: dict[str, tuple[str, str]] = field(default_factory=dict)
    env_set: str = ""

    @property
    def mode(self) -> str:
        """The way to communicate in one word: single, gloo, nccl, vccl, or nccl with what it does without."""
        if self.world_size == 1:
            return "single"
        without = [word for key, word in _WITHOUT.items() if self.env.get(key, ("0", ""))[0] not in ("0", "")]
        library = "vccl" if VCCL_KEY in self.env else "nccl"
        return "-".join([library, *without]) if self.backend == "nccl" else "gloo"


@dataclass(frozen=True)
class RankTask:
    """What every rank does to test a transport.

    Args:
        env: environment variables set before anything is initialised.
        sizes: bytes of the tensors whose all-reduce is timed.
        timeout_s: a collective that waits longer than this raises its library's own error.
        folder: rank-R.jsonl and rank-R.log are written here, and the port that rank 0 listens on.
    """

    backend: Backend
    device: Device
    world_size: int
    env: dict[str, str]
    sizes: tuple[int, ...]
    timeout_s: float
    folder: Path


@dataclass(frozen=True)
class TransportResult:
    """The outcome of testing a transport.

    Args:
        failed: the step that failed, or "" if the transport works.
        why: what the library said about the failure.
        found: step -> what rank 0 reported.
        seconds: bytes of a tensor -> seconds of its all-reduce.
        step_seconds: step -> seconds it took rank 0.
        wall_s: seconds that the test took.
    """

    transport: Transport
    failed: str = ""
    why: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def bandwidth(self) -> dict[int, float]:
        """Bytes of the tensor -> bus bandwidth in GB/s (1e9): each rank's link transfers 2(n-1)/n of the tensor."""
        world = self.transport.world_size
        if world < 2:  # one rank transfers nothing
            return {}
        return {size: 2 * (world - 1) / world * size / seconds / 1e9 for size, seconds in self.seconds.items()}

    @property
    def gradient_seconds(self) -> float | None:
        """Seconds to reduce the gradients of Qwen2.5-0.5B once, at the largest size's bandwidth, without overlap."""
        if self.transport.world_size < 2 or not self.seconds:
            return None
        size = max(self.seconds)
        return self.seconds[size] * GRADIENT_BYTES / size


_NO_P2P = {"NCCL_P2P_DISABLE": ("1", "GPUs cannot access each other's memory: copy through the host's instead")}
_NO_SHM = {"NCCL_SHM_DISABLE": ("1", "NCCL cannot use /dev/shm: communicate without it")}
_LOOPBACK = {
    "NCCL_SOCKET_IFNAME": ("lo", "NCCL finds no other usable interface; one machine only"),
    "GLOO_SOCKET_IFNAME": ("lo", "the host name leads to no usable interface; one machine only"),
}
_GLOO = {BACKEND_KEY: ("gloo", "NCCL does not work here: TCP, no distributed optimizer; a diagnostic")}


def list_transports(gpus: int, ranks: int) -> list[Transport]:
    """The transports for `ranks` ranks on a machine with `gpus` GPUs, best first."""
    if gpus == 0:
        loopback = {"GLOO_SOCKET_IFNAME": _LOOPBACK["GLOO_SOCKET_IFNAME"]}
        single = [
            Transport("one CPU rank", "gloo", "cpu", 1),
            Transport("one CPU rank, loopback", "gloo", "cpu", 1, loopback),
        ]
        if ranks == 1:
            return single
        return [
            Transport(f"Gloo, {ranks} CPU ranks", "gloo", "cpu", ranks),
            Transport("Gloo on the loopback interface", "gloo", "cpu", ranks, loopback),
            *single,
        ]
    if ranks == 1:
        return [
            Transport("one GPU", "nccl", "cuda", 1),
            Transport("one GPU, loopback", "nccl", "cuda", 1, _LOOPBACK),
            Transport("one GPU, Gloo", "gloo", "cuda", 1, _GLOO, "gloo"),
        ]
    return [
        Transport(f"NCCL, {ranks} GPUs", "nccl", "cuda", ranks),
        Transport("NCCL, P2P off", "nccl", "cuda", ranks, _NO_P2P),
        Transport("NCCL, SHM off", "nccl", "cuda", ranks, _NO_SHM, "nccl-no-shm"),
        Transport("NCCL, P2P and SHM off", "nccl", "cuda", ranks, _NO_P2P | _NO_SHM),
        Transport("NCCL, loopback", "nccl", "cuda", ranks, _LOOPBACK),
        Transport("Gloo", "gloo", "cuda", ranks, _GLOO, "gloo"),
        Transport("one GPU", "nccl", "cuda", 1),
    ]


def transport_of_set(name: str, settings: list[Setting], gpus: int, ranks: int) -> Transport:
    """The one transport that an environment set asks for: its variables, and Gloo or NCCL as it says."""
    env = {setting.key: (setting.value, setting.reason) for setting in settings}
    gloo = gpus == 0 or env.get(BACKEND_KEY, ("nccl", ""))[0] == "gloo"
    return Transport(f"--env {name}", "gloo" if gloo else "nccl", "cuda" if gpus else "cpu", ranks, env, name)
