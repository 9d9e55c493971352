"""A plan as text for a terminal: a heading for each question, and under every number what it rests on."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator

from common.quantities import GIB, format_duration
from launcher.preflight.check import checkpoint_disk_bytes, most_checkpoints
from planning.plan import RunPlan
from recipes import memory
from recipes.curve import sketch

WIDTH = 100
_NAME = 14  # columns of the names on the left


def format_plan(found: RunPlan) -> str:
    """The whole page."""
    parts = [_run, _model, _tokens, _memory, _disk, _time, _learning_rate, _warnings, _verdict]
    return "\n".join(line.rstrip() for part in parts for line in part(found))


def name_and_text(name: str, text: str) -> Iterator[str]:
    """A name and its text, which goes on below itself."""
    lines = textwrap.wrap(text, WIDTH - _NAME, break_long_words=False, break_on_hyphens=False) or [""]
    for position, line in enumerate(lines):
        yield f"{name if position == 0 else '':<{_NAME}}{line}"


def _run(found: RunPlan) -> Iterator[str]:
    plan = found.plan
    executor = f"executor {found.executor}" if found.executor else "several nodes need --executor slurm, k8s or mpirun"
    where = f"{plan.num_nodes} node(s) x {plan.devices} device(s), {executor}"
    yield from name_and_text("recipe", f"{found.resolved.spec.recipe}: {found.resolved.recipe.summary}")
    yield from name_and_text("where", where)
    card = found.hardware.card
    if card is not None:
        yield from name_and_text("GPU", f"{card.name}, {card.memory_gib:.1f} GiB ({found.hardware.source})")
    else:
        yield from name_and_text("CPU", found.hardware.source)
    if found.changed:
        yield from name_and_text(
            "chosen", f"{' '.join(found.changed)} (the launcher would choose this batch for this GPU)"
        )


def _model(found: RunPlan) -> Iterator[str]:
    shape = found.plan.shape
    yield ""
    yield from name_and_text("parameters", f"{shape.num_parameters:,} ({shape.num_parameters / 1e6:.1f}M)")
    for name, count in shape.parameters_by_part.items():
        share = f"{count:>13,}  {count / shape.num_parameters:6.1%}" if count else "tied to the embedding"
        yield f"  {name:<{_NAME}}{share}"


def _tokens(found: RunPlan) -> Iterator[str]:
    plan = found.plan
    total = plan.max_steps * plan.tokens_per_step
    yield ""
    batch = (
        f"micro batch {plan.micro_batch_size} x {plan.data_parallel} replica(s) x {plan.num_micro_batches} accumulated"
    )
    yield from name_and_text("per step", f"{plan.tokens_per_step:,} tokens = {batch} x {plan.seq_length} tokens")
    yield from name_and_text("length", f"{plan.max_steps:,} steps = {total:,} tokens")
    stages = {row.stage for row in found.domains}
    for row in found.domains:
        stage = f"{row.stage}: " if len(stages) > 1 else ""
        role = f" ({row.role})" if row.role else ""
        if row.role == "watch" or (row.tokens == 0 and row.role):
            text = "validated, never trained on"
        else:
            read = "the share follows the corpora" if row.tokens is None else f"{row.tokens:,} tokens"
            share = f", {row.tokens / total:.1%}" if row.tokens is not None and total else ""
            text = read + share + (f", read {row.epochs:.2f} times" if row.epochs is not None else "")
        yield from name_and_text("", f"{stage}{row.name}{role}: {text}")
    if found.data_problem:
        yield from name_and_text("", f"epochs are not known yet: {found.data_problem}")


def _memory(found: RunPlan) -> Iterator[str]:
    yield ""
    card, peak = found.hardware.card, found.peak
    if card is None or peak is None:
        state = memory.cpu_state_bytes(found.plan) / GIB
        text = f"{_gib(state)} of weights, gradients and optimizer per rank, beside the libraries and activations"
        yield from name_and_text("memory", text + "; on a CPU nothing more is estimated")
        if found.measured_memory_gib is not None:
            yield from name_and_text(
                "", f"{found.measured_memory_gib:.2f} GiB of the process were measured in 20 steps"
            )
        return
    verdict = "fits" if found.fits else "does NOT fit"
    total = f"{found.peak_gib:.1f} of {card.memory_gib:.1f} GiB on the fullest GPU: {verdict}"
    measured = found.measured_memory_gib
    source = "estimate, within 5%: docs/measurements/gpu-memory.md"
    if measured is not None:
        source = f"measured in 20 steps: {measured:.2f} GiB in the allocator, and what lies outside it; estimated"
        source += f" {peak.gpu_gib:.1f} GiB, by part"
    yield from name_and_text("memory", f"{total} ({source})")
    for part in dataclasses.fields(peak):
        yield f"  {part.name:<{_NAME - 2}}{getattr(peak, part.name) / GIB:8.2f} GiB"
    reserve = peak.reserved_gib - peak.allocated_gib
    yield f"  {'allocator':<{_NAME - 2}}{reserve:8.2f} GiB"
    yield f"  {'outside':<{_NAME - 2}}{memory.OUTSIDE_GIB:8.2f} GiB  CUDA context, cuBLAS, NCCL"
    if found.most_micro_batch is not None:
        yield from name_and_text(
            "", f"largest micro batch that fits and divides the global batch: {found.most_micro_batch}"
        )
    if not found.fits:
        yield from name_and_text("", f"do this: {found.room_advice}")


def _disk(found: RunPlan) -> Iterator[str]:
    plan = found.plan
    need, free = checkpoint_disk_bytes(plan), found.free_disk
    most = most_checkpoints(plan)
    kept = f"the newest {plan.keep_checkpoints}" + (f", the best of {plan.keep_best}" if plan.keep_best else "")
    one = f"{_size(plan.checkpoint_bytes)} each, at most {most} at once"
    if most > plan.keep_checkpoints + bool(plan.keep_best):
        one += f": {kept} and one that is being written"
    room = "" if need <= free else ": NOT enough"
    yield from name_and_text("disk", f"{_size(need)} for checkpoints ({one}); {_size(free)} are free here{room}")


def _time(found: RunPlan) -> Iterator[str]:
    cost = found.cost
    yield ""
    if cost.total_seconds is None or cost.training_seconds is None or cost.tokens_per_second is None:
        yield from name_and_text("time", f"not estimated: {cost.source}")
        return
    yield from name_and_text("time", _duration(cost.total_seconds))
    rate = f"{cost.tokens_per_second:,.0f} tokens/s, {cost.step_seconds:.3g} s per step"
    for name, seconds, text in (
        ("training", cost.training_seconds, rate),
        ("start", cost.start_seconds, ""),
        ("validation", cost.validation_seconds, ""),
        ("checkpoints", cost.checkpoint_seconds, ""),
    ):
        yield f"  {name:<{_NAME - 2}}{_duration(seconds):>12}  {text}"
    yield from name_and_text("", f"source: {cost.source}")
    yield from name_and_text("", f"beside the steps: {cost.other_source}")
    if cost.energy_kwh is not None:
        power = f"{cost.power_w:.0f} W x {cost.ranks} GPU(s)"
        yield from name_and_text(
            "energy", f"{cost.energy_kwh:.3g} kWh of the GPUs = {power} over that time ({cost.power_source})"
        )
    else:
        yield from name_and_text("energy", f"not estimated: {cost.power_source}")


def _learning_rate(found: RunPlan) -> Iterator[str]:
    plan, schedule = found.plan, found.plan.learning_rate()
    phases = ", ".join(
        f"{p.name} {p.first:,} to {min(plan.max_steps, p.end or plan.max_steps):,}"
        for p in schedule.phases()
        if p.first < plan.max_steps
    )
    profile = f", profile {plan.profile}" if plan.profile else ""
    yield ""
    rate = f"{schedule.kind}{profile}: peak {schedule.max_lr:g}, last {schedule.lr(max(0, plan.max_steps - 1)):.3g}"
    yield from name_and_text("learning rate", f"{rate}; steps: {phases}")
    for row in sketch(schedule, plan.max_steps, WIDTH - _NAME):
        yield f"{'':<{_NAME}}{row}"


def _warnings(found: RunPlan) -> Iterator[str]:
    lines = [*map(str, found.warnings), *found.schedule_warnings]
    lines += [_problem(one.problem) for one in found.problems if not one.fatal]
    if lines:
        yield ""
    for text in lines:
        yield from name_and_text("warning", text)


def _problem(problem: Exception) -> str:
    """What, found and advice of an error in one line."""
    what, found, do = (getattr(problem, name) for name in ("what", "found", "do"))
    return f"{what}: {found}; {do}"


def _verdict(found: RunPlan) -> Iterator[str]:
    fatal = [one.problem for one in found.problems if one.fatal]
    if fatal:
        yield ""
    for problem in fatal:
        yield from name_and_text("REFUSED", _problem(problem))


def _gib(value: float) -> str:
    return f"{value:.1f} GiB" if value >= 1 else f"{value * 1024:.0f} MiB"


def _size(count: float) -> str:
    return _gib(count / GIB)


def _duration(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 1 else f"{seconds:.1f} s"
