"""Chooses the micro batch for the GPUs of this run and records it as overrides."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging

from common import machine_facts
from common.rundir import RunDir
from recipes import memory
from recipes.overrides import Override
from recipes.plan import Plan
from recipes.resolve import Resolved

log = logging.getLogger("launch")
BATCH = ("data.micro_batch_size", "data.global_batch_size", "data.seq_length", "model.config.seq_length")


def fit(resolved: Resolved, folder: RunDir, *, ask_gpus: bool) -> Resolved:
    """The same run with overrides for what the recipe leaves to the machine, each choice logged with its reason.

    A number that the user gave is never changed. A resumed run keeps the batch it began with, in smaller pieces where
    more replicas share it.

    Args:
        ask_gpus: this machine trains, so that the size of its GPUs decides.
    """
    plan = resolved.plan
    if resolved.spec.resume:
        recorded = folder.spec().overrides
        batch = [override for override in resolved.overrides if override.path in BATCH]
        for override in batch:
            log.info("%s (%s)", override, "as this run began" if str(override) in recorded else "changed")
        own = any(one.path == "data.micro_batch_size" and str(one) not in recorded for one in batch)
        return resolved if own else _fit_replicas(resolved)
    if plan.memory_profile and not resolved.is_overridden(*BATCH) and resolved.spec.tokens_per_step is None:
        return _fit_profile(resolved, ask_gpus)
    if resolved.is_overridden("data.micro_batch_size"):
        return resolved  # preflight says what is wrong with it
    size, path = _gpu(resolved, ask_gpus) if plan.accelerator == "gpu" and plan.model_parallel == 1 else (None, "fast")
    return _fill_gpu(resolved, size, path) if size else _fit_replicas(resolved)


def _gpu(resolved: Resolved, ask_gpus: bool) -> tuple[float | None, memory.Path]:
    """GiB of the smallest GPU that a rank gets, if it can be asked, and the implementation that trains on it."""
    gpus = machine_facts.query_gpus().visible[: resolved.plan.devices] if ask_gpus else ()
    size = min((gpu.total / memory.GIB for gpu in gpus), default=None)
    if any(one.path in memory.MEMORY_LEVERS and one.text.strip().lower() == "false" for one in resolved.overrides):
        return size, "plain"
    have_te = not gpus or importlib.util.find_spec("transformer_engine") is not None
    return size, "fast" if have_te else "sdpa"


def _fill_gpu(resolved: Resolved, size: float, path: memory.Path) -> Resolved:
    """The same global batch in as few pieces as fit: larger matrix products, fewer launches."""
    plan = resolved.plan
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


def _fit_profile(resolved: Resolved, ask_gpus: bool) -> Resolved:
    """A memory profile's batch on the smallest GPU that a rank gets; the recipe's own numbers are for 80 GiB."""
    plan = resolved.plan
    assert plan.memory_profile is not None
    asked, path = _gpu(resolved, ask_gpus)
    size = asked or memory.ASSUMED_GPU_GIB
    if asked is None:
        log.info("profile %s: no GPU to ask on this machine, %.0f GiB assumed", plan.memory_profile, size)
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
