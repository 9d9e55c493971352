"""Time and energy of a run, each with its source: measured on this machine, or scaled from docs/measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from launcher import batch_size
from launcher.earlier_runs import EarlierRun, find_earlier_runs
from planning.calibrate import Calibration
from planning.figures import constant, find_card, flops_per_token, nearest_rate
from planning.hardware import Hardware, host_name
from recipes import memory
from recipes.plan import Plan
from recipes.resolve import Resolved

FORWARD_SHARE = 3.0  # a validation only computes forward, a third of the operations of a training step
_KEPT = (
    *("seq_length", "isolate_documents", "micro_batch_size", "devices", "num_nodes"),
    *("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "accelerator"),
)


@dataclass(frozen=True)
class Cost:
    """Seconds and energy of a whole run.

    Args:
        tokens_per_second: of all ranks; None where nothing allows an estimate.
        step_seconds: of one optimizer step.
        start_seconds, validation_seconds, checkpoint_seconds: beside the steps, in all.
        source: of the rate.
        other_source: of the seconds beside the steps.
        power_w: of one GPU; None on a CPU, or where nothing is known.
        power_source: what the power rests on.
        ranks: GPUs that take that power.
        num_steps: optimizer steps.
    """

    tokens_per_second: float | None
    step_seconds: float | None
    start_seconds: float
    validation_seconds: float
    checkpoint_seconds: float
    source: str
    other_source: str
    power_w: float | None
    power_source: str
    ranks: int
    num_steps: int

    @property
    def training_seconds(self) -> float | None:
        """The optimizer steps."""
        return None if self.step_seconds is None else self.num_steps * self.step_seconds

    @property
    def total_seconds(self) -> float | None:
        """From the command to its end."""
        if self.training_seconds is None:
            return None
        return self.training_seconds + self.start_seconds + self.validation_seconds + self.checkpoint_seconds

    @property
    def energy_kwh(self) -> float | None:
        """Of the GPUs, over the whole time."""
        if self.power_w is None or self.total_seconds is None:
            return None
        return self.power_w * self.ranks * self.total_seconds / 3.6e6


def implementation_of(resolved: Resolved, hardware: Hardware) -> memory.Path:
    """Which code trains there."""
    size = hardware.card.memory_gib if hardware.card else 0.0
    return batch_size.implementation(resolved, batch_size.Gpus(size, hardware.path))


def estimate_cost(
    resolved: Resolved, hardware: Hardware, calibration: Calibration | None, validation_tokens: float
) -> Cost:
    """Time and energy: from a calibration, else from an earlier run of this kind here, else from the docs' tables.

    Args:
        validation_tokens: tokens that one validation reads, over all domains.
    """
    plan = resolved.plan
    if calibration is not None:
        return _calibrated(plan, calibration)
    earlier = _earlier_run(resolved, hardware)
    rate: float | None
    if earlier is not None and earlier.tokens_per_second:
        rate, source = earlier.tokens_per_second, f"measured on this {_device(plan)}: {earlier.folder}"
    else:
        rate, source = _scaled_rate(resolved, hardware)
    power, power_source = _power(hardware, earlier, plan)
    start, start_page = constant("start_seconds", plan.accelerator)
    speed, save_page = constant("checkpoint_bytes_per_second")
    validations = count_validations(plan)
    return Cost(
        tokens_per_second=rate,
        step_seconds=plan.tokens_per_step / rate if rate else None,
        start_seconds=start,
        validation_seconds=validations * validation_tokens / (FORWARD_SHARE * rate) if rate else 0.0,
        checkpoint_seconds=plan.checkpoint_bytes / speed,
        source=source,
        other_source=f"start: {start_page}; validation: a third of training; the last checkpoint: {save_page}",
        power_w=power,
        power_source=power_source,
        ranks=plan.world_size,
        num_steps=plan.max_steps,
    )


def _calibrated(plan: Plan, found: Calibration) -> Cost:
    on_the_way = (plan.max_steps - 1) // plan.save_every_n_steps
    return Cost(
        tokens_per_second=plan.tokens_per_step / found.step_seconds,
        step_seconds=found.step_seconds,
        start_seconds=found.start_seconds,
        validation_seconds=count_validations(plan) * found.validation_seconds,
        checkpoint_seconds=on_the_way * found.stall_seconds + found.save_seconds,
        source=f"measured on this {_device(plan)}: 20 steps in {found.run} on {found.date}"
        f", which varied by {found.spread:.0%} (10th to 90th percentile)",
        other_source="measured in the same 20 steps",
        power_w=found.power_w,
        power_source=f"measured in {found.run}" if found.power_w else "no power is reported here",
        ranks=plan.world_size,
        num_steps=plan.max_steps,
    )


def count_validations(plan: Plan) -> int:
    """Validations of a run: at step 0, at the interval and at the end."""
    if not plan.limit_val_batches:
        return 0
    return 1 + math.ceil(plan.max_steps / plan.val_check_interval)


def _device(plan: Plan) -> str:
    return "GPU" if plan.accelerator == "gpu" else "machine"


def _earlier_run(resolved: Resolved, hardware: Hardware) -> EarlierRun | None:
    """The newest finished run of this shape, batch and layout on this hardware."""
    if not hardware.is_here:
        return None
    for run in find_earlier_runs(Path(resolved.spec.runs)):
        same_device = run.gpu == hardware.card.name if hardware.card else (run.host == host_name() and not run.gpu)
        theirs, ours = run.resolved.plan, resolved.plan
        same_plan = all(getattr(theirs, name) == getattr(ours, name) for name in _KEPT)
        same_path = implementation_of(run.resolved, hardware) == implementation_of(resolved, hardware)
        if run.finished and same_device and same_plan and same_path and theirs.shape == ours.shape:
            return run
    return None


def _scaled_rate(resolved: Resolved, hardware: Hardware) -> tuple[float | None, str]:
    """Tokens per second from the most similar measured run, by operations per token, matrix rate and ranks."""
    plan, card = resolved.plan, hardware.card
    if card is not None and card.bf16_tflops is None:
        return None, f"nothing is known of the speed of {card.name}: name a GPU with --gpu, or --calibrate on it"
    path = implementation_of(resolved, hardware) if card else "cpu"
    row = nearest_rate(plan, path, card)
    factors = []
    size = flops_per_token(row.plan.shape, row.plan.seq_length) / flops_per_token(plan.shape, plan.seq_length)
    if abs(size - 1) > 0.005:
        factors.append((size, "operations per token"))
    if card is not None and card.bf16_tflops is not None:
        own = find_card(row.card).bf16_tflops or card.bf16_tflops
        if card.bf16_tflops != own:
            factors.append((card.bf16_tflops / own, f"matrix rate, {card.bf16_tflops:g} of {own:g} TFLOP/s"))
    if row.plan.world_size != plan.world_size:
        share, _ = constant("data_parallel_efficiency")
        lost = share if plan.world_size > row.plan.world_size else 1.0
        factors.append(
            (lost * plan.world_size / row.plan.world_size, f"{plan.world_size} of {row.plan.world_size} ranks")
        )
    rate = row.tokens_per_second * math.prod(factor for factor, _ in factors)
    terms = "".join(f" x {factor:.3g} ({name})" for factor, name in factors)
    network = "; the network between nodes is not in it" if plan.num_nodes > 1 else ""
    scaled = ", scaled" if factors else ""
    where = f"{row.plan.world_size} x {row.card}" if card is not None else row.card
    return rate, f"from docs' table{scaled}: {row.source}, {row.tokens_per_second:,.0f} on {where}{terms}{network}"


def _power(hardware: Hardware, earlier: EarlierRun | None, plan: Plan) -> tuple[float | None, str]:
    if hardware.card is None:
        return None, "a CPU reports none"
    if earlier is not None and earlier.power_w is not None:
        return earlier.power_w, f"measured on this {_device(plan)}: {earlier.folder}"
    if hardware.card.power_w is None:
        return None, f"the power of {hardware.card.name} is not known"
    return hardware.card.power_w, "at most: the power limit of its data sheet"
