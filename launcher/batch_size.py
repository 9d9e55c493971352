"""The batch that the user left open: fitted to the card and to the replicas, as overrides that are recorded."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os

from common import machine_facts
from common.environment.sets import BACKEND_KEY
from common.rundir import RunDir
from common.spec import RunSpec
from recipes import memory, overrides, registry
from recipes.plan import Plan

log = logging.getLogger("launch")
BATCH = ("data.micro_batch_size", "data.global_batch_size", "data.seq_length", "model.config.seq_length")


def fit(spec: RunSpec, folder: RunDir, *, here: bool) -> RunSpec:
    """The spec with words for what the recipe leaves to the machine, each choice logged with its reason.

    A number of the user's own is never changed; a resumed run keeps the batch it began with, in smaller pieces where
    more replicas share it.

    Args:
        here: this machine trains, so that its card can be asked.
    """
    given = [word for word in spec.overrides if overrides.split(word)[0] in BATCH]
    if spec.resume and not given and folder.spec_file.is_file():
        kept = [word for word in folder.spec().overrides if overrides.split(word)[0] in BATCH]
        for word in kept:
            log.info("%s (as this run began)", word)
        spec = _with(spec, kept)
        return _to_replicas(spec, planned(spec))
    left = planned(spec)
    if left.memory_profile and not given:
        return _to_card(spec, left, here)
    if any(overrides.split(word)[0] == "data.micro_batch_size" for word in given):
        return spec  # preflight says what is wrong with it
    alone = left.accelerator == "gpu" and left.model_parallel == 1
    size, path = _card(spec, left, here) if alone else (None, "fast")
    return _largest(spec, left, size, path) if size else _to_replicas(spec, left)


def planned(spec: RunSpec) -> Plan:
    """The plan of a spec in this environment, as far as it can be told before NeMo is imported."""
    found = overrides.early(registry.resolve(spec.recipe).plan, spec.overrides)
    if os.environ.get(BACKEND_KEY) == "gloo":  # recipes/build/collectives.py
        found = dataclasses.replace(found, distributed_optimizer=False)
    return found


def _card(spec: RunSpec, plan: Plan, here: bool) -> tuple[float | None, memory.Path]:
    """GiB of the smallest card that a rank gets, if it can be asked, and the path that trains on it."""
    cards = machine_facts.query_gpus().visible[: plan.devices] if here else ()
    size = min((card.total / memory.GIB for card in cards), default=None)
    words = [overrides.split(word) for word in spec.overrides]
    if any(path in memory.SPARING and value.strip().lower() == "false" for path, _, value in words):
        return size, "plain"
    have_te = not cards or importlib.util.find_spec("transformer_engine") is not None
    return size, "fast" if have_te else "sdpa"


def _largest(spec: RunSpec, plan: Plan, size: float, path: memory.Path) -> RunSpec:
    """The same global batch in the fewest pieces: fuller matrix products, fewer launches."""
    best = memory.largest_micro_batch(plan, size, path)
    if best == plan.micro_batch_size:
        return spec
    found = memory.estimate(dataclasses.replace(plan, micro_batch_size=best), path)
    log.info(
        "data.micro_batch_size: %d -> %d samples, the most that divides the global batch and fits into %.0f%% of"
        " %.0f GiB (estimated %s)",
        *(plan.micro_batch_size, best, 100 * memory.SPARED, size, found),
    )
    return _with(spec, [f"data.micro_batch_size={best}"])


def _with(spec: RunSpec, words: list[str]) -> RunSpec:
    return dataclasses.replace(spec, overrides=(*spec.overrides, *words))


def _to_card(spec: RunSpec, plan: Plan, here: bool) -> RunSpec:
    """A profile's batch on the smallest card that a rank gets; the recipe's own numbers are for 80 GiB."""
    assert plan.memory_profile is not None
    asked, path = _card(spec, plan, here)
    size = asked or memory.CARD_GIB
    if asked is None:
        log.info("profile %s: no card to ask here, %.0f GiB assumed", plan.memory_profile, size)
    fitted, reasons = memory.fit(plan, plan.memory_profile, size, path)
    for reason in reasons:
        log.info("%s", reason)
    now, then = fitted.values(), plan.values()
    return _with(spec, [f"{path}={now[path]}" for path in BATCH if now[path] != then[path]])


def _to_replicas(spec: RunSpec, plan: Plan) -> RunSpec:
    """The global batch is what is trained; how many of its samples a rank takes at once only has to fit."""
    whole, replicas, size = plan.global_batch_size, plan.data_parallel, plan.micro_batch_size
    if replicas < 2 or size < 1 or whole % replicas or whole % (size * replicas) == 0:
        return spec  # it fits, or preflight says what is wrong with it
    share = whole // replicas
    fitting = max(n for n in range(1, size + 1) if share % n == 0)
    log.info(
        "data.micro_batch_size: %d -> %d samples, the most that divides the %d of a replica (global batch %d / %d)",
        *(size, fitting, share, whole, replicas),
    )
    return _with(spec, [f"data.micro_batch_size={fitting}"])
