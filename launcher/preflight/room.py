"""Preflight of the memory that a run needs at its peak: a run that cannot fit is refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from common.quantities import GIB
from common.rundir import RunDir
from launcher.preflight.findings import Finding, error, warning
from recipes import memory
from recipes.plan import Plan


@dataclass(frozen=True)
class RankGpu:
    """The smallest GPU that a rank of the run gets.

    Args:
        gib: its whole memory.
        path: which code trains there (recipes/memory.py).
    """

    gib: float
    path: memory.Path = "fast"


def check_room(plan: Plan, run: RunDir, gpu: RankGpu | None) -> Iterator[Finding]:
    """Check that the estimated peak fits: an error where it cannot even if the estimate is 5% too high, else a warning.

    Args:
        gpu: None for a run on the CPUs of this machine.
    """
    if min(plan.micro_batch_size, plan.global_batch_size, plan.model_parallel, plan.pipeline_parallel) < 1:
        return  # recipes/limits.py reports it
    if plan.accelerator == "cpu":
        yield from _check_host(plan)
        return
    if gpu is None:
        return
    found = memory.estimate(plan, gpu.path)
    if found.gpu_gib <= gpu.gib:
        return
    cannot_fit = found.gpu_gib / (1 + memory.ESTIMATE_ERROR) > gpu.gib
    make = error if cannot_fit else warning
    yield make(
        "the run does not fit into the GPU's memory" if cannot_fit else "the run may not fit into the GPU's memory",
        expected=f"a peak of at most {gpu.gib:.1f} GiB per GPU",
        found=f"micro batch {plan.micro_batch_size} x {plan.seq_length} tokens: estimated {found}",
        do=advise_room(plan, gpu),
    )


def advise_room(plan: Plan, gpu: RankGpu) -> str:
    """Overrides after which the run fits, or what else can be changed."""
    best = memory.largest_that_fits(plan, gpu.gib, gpu.path)
    if best is not None and best < plan.micro_batch_size:
        return f"data.micro_batch_size={best}, the largest that fits and divides the global batch"
    ways = [*_shorter_sequences(plan, gpu), *_more_ranks(plan, gpu), "a larger GPU"]
    return ", or ".join(ways) + "; at this size no micro batch fits"


def _shorter_sequences(plan: Plan, gpu: RankGpu) -> Iterator[str]:
    """The longest half, quarter ... of the sequence that fits, with the micro batch that it needs."""
    length = plan.seq_length // 2
    while length >= 256:
        shorter = replace(plan, seq_length=length, model_seq_length=length)
        if (best := memory.largest_that_fits(shorter, gpu.gib, gpu.path)) is not None:
            size = f" data.micro_batch_size={best}" if best < plan.micro_batch_size else ""
            yield f"data.seq_length={length} model.config.seq_length={length}{size}"
            return
        length //= 2


def _more_ranks(plan: Plan, gpu: RankGpu) -> Iterator[str]:
    """Twice the ranks, each with half of every layer, where the shape allows it and it fits."""
    parallel = 2 * plan.tensor_parallel
    split = replace(plan, devices=2 * plan.devices, tensor_parallel=parallel)
    divides = all(n % parallel == 0 for n in (plan.shape.num_attention_heads, plan.shape.num_query_groups))
    if divides and (best := memory.largest_that_fits(split, gpu.gib, gpu.path)) is not None:
        size = f" data.micro_batch_size={best}" if best < plan.micro_batch_size else ""
        yield f"--devices {split.devices} trainer.strategy.tensor_model_parallel_size={parallel}{size}"


def _check_host(plan: Plan) -> Iterator[Finding]:
    """On a CPU only the part that is certain is compared: fp32 weights, gradients and Adam's moments of each rank."""
    import psutil

    need = plan.devices * memory.cpu_state_bytes(plan) / GIB
    total = psutil.virtual_memory().total / GIB
    if need > total:
        yield error(
            "the run does not fit into the memory of this machine",
            expected=f"{need:.1f} GiB for weights, gradients and optimizer of {plan.devices} rank(s)",
            found=f"{total:.1f} GiB in all",
            do="a smaller model, fewer ranks per machine (--devices), or a GPU recipe; no micro batch fits",
        )
