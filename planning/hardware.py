"""What a run is planned for: the GPU that is named, that a cluster file describes, or that this machine has."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import machine_facts
from common.quantities import GIB
from launcher import batch_size
from planning.figures import Card, find_card, recognise_card
from recipes import memory
from recipes.memory import ASSUMED_GPU_GIB
from recipes.plan import Plan

if TYPE_CHECKING:
    from launcher.cluster_file import Cluster
    from planning.request import PlanRequest


@dataclass(frozen=True)
class Hardware:
    """Where the run is to train.

    Args:
        card: each rank's GPU; None for a run on CPUs.
        source: why it is this one.
        is_here: it is this machine, so that measurements made here hold.
        path: the fastest code that is installed where it trains.
    """

    card: Card | None
    source: str
    is_here: bool
    path: memory.Path = "fast"


def find_hardware(plan: Plan, request: PlanRequest, cluster: Cluster | None, trains_here: bool) -> Hardware:
    """The card that the user names, else that of the cluster file, else this machine's, else one of 80 GiB.

    Raises:
        UserError: a card that is not in the table.
    """
    if plan.accelerator == "cpu":
        return Hardware(None, describe_cpu(), is_here=trains_here)
    if request.gpu is not None:
        return Hardware(find_card(request.gpu), "as named with --gpu; its data sheet", is_here=False)
    if request.gpu_memory_gib is not None:
        return Hardware(Card("a GPU", request.gpu_memory_gib), "as named with --gpu-memory-gib", is_here=False)
    if cluster is not None and cluster.gpu_memory_gib is not None:
        return Hardware(Card("a GPU", cluster.gpu_memory_gib), "gpu_memory_gib of the cluster file", is_here=False)
    found = machine_facts.query_gpus().visible[: plan.devices] if trains_here else ()
    if not found:
        why = "no GPU here" if trains_here else "it trains elsewhere"
        card = dataclasses.replace(find_card("H100"), memory_gib=ASSUMED_GPU_GIB)
        return Hardware(card, f"assumed, as {why}: name one with --gpu", is_here=False)
    smallest = min(found, key=lambda gpu: gpu.total)
    card = recognise_card(smallest.name, smallest.total / GIB)
    return Hardware(card, "found on this machine", True, batch_size.installed_path([gpu.name for gpu in found]))


def describe_cpu() -> str:
    """This machine's processor and how many of its cores a process may use."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - a pseudo file
            model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{usable_cores()} core(s) of {model}"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def host_name() -> str:
    """As system.jsonl names this machine."""
    return socket.gethostname()
