"""Chooses the micro batch for the GPUs of this run and records it as overrides."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from common import machine_facts
from common.quantities import GIB
from common.rundir import RunDir
from recipes import memory
from recipes.overrides import Override
from recipes.plan import Plan
from recipes.resolve import Resolved

log = logging.getLogger("launch")
BATCH = ("data.micro_batch_size", "data.global_batch_size", "data.seq_length", "model.config.seq_length")


@dataclass(frozen=True)
class Gpus:
    """The smallest GPU that a rank of the run gets.

    Args:
        gib: its memory.
        path: the fastest code that is installed where it trains.
    """

    gib: float
    path: memory.Path = "fast"


def gpus_of_this_machine(plan: Plan) -> Gpus | None:
    """The visible GPUs that a run of this plan takes here; None without any."""
    found = machine_facts.query_gpus().visible[: plan.devices]
    if plan.accelerator != "gpu" or not found:
        return None
    return Gpus(min(gpu.total / GIB for gpu in found), installed_path([gpu.name for gpu in found]))


def installed_path(gpu_names: Sequence[str]) -> memory.Path:
    """The fastest code that is installed on this machine for its GPUs; QuACK's products are for Hopper only."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "sdpa"
    return "quack" if are_hopper(gpu_names) and importlib.util.find_spec("quack") is not None else "fast"


def are_hopper(gpu_names: Sequence[str]) -> bool:
    """Whether all of these GPUs are of NVIDIA's Hopper generation, as the driver or the table of cards names them."""
    return all(re.search(r"\bG?H(100|200|800|20)\b", name) for name in gpu_names)


def fit(resolved: Resolved, folder: RunDir, gpus: Gpus | None, *, trains_elsewhere: bool = False) -> Resolved:
    """The same run with overrides for what the recipe leaves to the machine, each choice logged with its reason.

    A number that the user gave is never changed. A resumed run keeps the batch it began with, in smaller pieces where
    more replicas share it.

    Args:
        gpus: what the run trains on; None where that is not known.
        trains_elsewhere: the ranks know their GPUs, and fit the batch when they start (launcher/rank_main.py).
    """
    plan = resolved.plan
    if resolved.spec.resume:
        recorded = folder.spec().overrides
        batch = [override for override in resolved.overrides if override.path in BATCH]
        for override in batch:
            log.info("%s (%s)", override, "as this run began" if str(override) in recorded else "changed")
        own = any(one.path == "data.micro_batch_size" and str(one) not in recorded for one in batch)
        return resolved if own else _fit_replicas(resolved)
    by_profile = plan.memory_profile and not resolved.is_overridden(*BATCH) and resolved.spec.tokens_per_step is None
    if resolved.is_overridden("data.micro_batch_size"):
        return resolved  # preflight says what is wrong with it
    if gpus is None and trains_elsewhere and plan.accelerator == "gpu":
        log.info("batch: fitted to the GPUs of the machine that trains, when it starts there")
        return resolved if by_profile else _fit_replicas(resolved)
    if by_profile:
        return _fit_profile(resolved, gpus)
    if gpus is not None and plan.model_parallel == 1:
        return _fill_gpu(resolved, gpus)
    return _fit_replicas(resolved)


def implementation(resolved: Resolved, gpus: Gpus) -> memory.Path:
    """Which code trains: it decides how much memory a sample takes."""
    off = {one.path for one in resolved.overrides if one.text.strip().lower() == "false"}
    if off.intersection(memory.MEMORY_LEVERS):
        return "plain"
    if gpus.path == "quack" and (resolved.plan.model_parallel > 1 or off & {"speed.fused_mlp", "speed.fused_norm"}):
        return "fast"
    return gpus.path


def _fill_gpu(resolved: Resolved, gpus: Gpus) -> Resolved:
    """The same global batch in as few pieces as fit: larger matrix products, fewer launches."""
    plan, size, path = resolved.plan, gpus.gib, implementation(resolved, gpus)
    best = memory.largest_micro_batch(plan, size, path)
    if best == plan.micro_batch_size:
        return resolved
    found = memory.estimate(dataclasses.replace(plan, micro_batch_size=best), path)
    log.info(
        "data.micro_batch_size: %d -> %d samples, the most that divides the global batch and fits into %.0f%% of"
        " %.0f GiB (estimated %s)",
        *(plan.micro_batch_size, best, 100 * memory.DEFAULT_SHARE, size, found),
    )
    return resolved.with_overrides(Override("data.micro_batch_size", "=", str(best)))


def _fit_profile(resolved: Resolved, gpus: Gpus | None) -> Resolved:
    """A memory profile's batch on the smallest GPU that a rank gets; the recipe's own numbers are for 80 GiB."""
    plan = resolved.plan
    assert plan.memory_profile is not None
    if gpus is None:
        gpus = Gpus(memory.ASSUMED_GPU_GIB)
        log.info("profile %s: no GPU to ask on this machine, %.0f GiB assumed", plan.memory_profile, gpus.gib)
    size, path = gpus.gib, implementation(resolved, gpus)
    fitted, reasons = memory.fit(plan, plan.memory_profile, size, path)
    for reason in reasons:
        log.info("%s", reason)
    now, then = fitted.values(), plan.values()
    return resolved.with_overrides(*(Override(at, "=", str(now[at])) for at in BATCH if now[at] != then[at]))


def _fit_replicas(resolved: Resolved) -> Resolved:
    """The global batch is what is trained; how many of its samples a rank takes at once only has to fit."""
    plan: Plan = resolved.plan
    total, replicas, size = plan.global_batch_size, plan.data_parallel, plan.micro_batch_size
    if replicas < 2 or size < 1 or total % replicas or total % (size * replicas) == 0:
        return resolved  # it fits, or preflight says what is wrong with it
    share = total // replicas
    fitting = max(n for n in range(1, size + 1) if share % n == 0)
    log.info(
        "data.micro_batch_size: %d -> %d samples, the most that divides the %d of a replica (global batch %d / %d)",
        *(size, fitting, share, total, replicas),
    )
    return resolved.with_overrides(Override("data.micro_batch_size", "=", str(fitting)))
