"""The plan of a run as plain values, which `plan --json` prints for other programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from common.quantities import GIB
from launcher.preflight import check as preflight
from planning.plan import RunPlan


def to_row(found: RunPlan) -> dict[str, Any]:
    """Plain values for other programs."""
    plan, cost, peak = found.plan, found.cost, found.peak
    schedule = plan.learning_rate()
    every = max(1, plan.max_steps // 200)
    return {
        "recipe": found.resolved.spec.recipe,
        "executor": found.executor or None,
        "overrides": list(found.resolved.spec.overrides),
        "chosen_for_the_gpu": list(found.changed),
        "parameters": {"total": plan.shape.num_parameters, **plan.shape.parameters_by_part},
        "ranks": {"nodes": plan.num_nodes, "devices": plan.devices, "data_parallel": plan.data_parallel},
        "batch": {
            "tokens_per_step": plan.tokens_per_step,
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "accumulated": plan.num_micro_batches,
            "seq_length": plan.seq_length,
        },
        "steps": plan.max_steps,
        "tokens": plan.max_steps * plan.tokens_per_step,
        "domains": [dataclasses.asdict(row) for row in found.domains],
        "data_problem": found.data_problem,
        "gpu": dataclasses.asdict(found.hardware.card) if found.hardware.card else None,
        "hardware": found.hardware.source,
        "memory_gib": None if peak is None else {
            **{part.name: getattr(peak, part.name) / GIB for part in dataclasses.fields(peak)},
            "reserved": peak.reserved_gib,
            "total": found.peak_gib,
            "measured": found.measured_memory_gib,
        },
        "fits": found.fits,
        "largest_micro_batch": found.most_micro_batch,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints_bytes": preflight.checkpoint_disk_bytes(plan),
        "free_disk_bytes": found.free_disk,
        "time": {
            "tokens_per_second": cost.tokens_per_second,
            "step_seconds": cost.step_seconds,
            "training_seconds": cost.training_seconds,
            "start_seconds": cost.start_seconds,
            "validation_seconds": cost.validation_seconds,
            "checkpoint_seconds": cost.checkpoint_seconds,
            "total_seconds": cost.total_seconds,
            "source": cost.source,
            "other_source": cost.other_source,
        },
        "energy": {"kwh": cost.energy_kwh, "power_w_per_gpu": cost.power_w, "source": cost.power_source},
        "learning_rate": {
            **plan.schedule_parameters,
            "max_lr": plan.max_lr,
            "points": [[step, schedule.lr(step)] for step in range(0, plan.max_steps, every)],
        },
        "problems": [
            {"fatal": one.fatal, "what": one.problem.what, "found": one.problem.found, "do": one.problem.do}
            for one in found.problems
        ],
        "warnings": [dataclasses.asdict(one) for one in found.warnings],
        "schedule_warnings": list(found.schedule_warnings),
    }  # fmt: skip
