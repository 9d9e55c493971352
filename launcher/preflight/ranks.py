"""Preflight of the ranks on this machine: GPU memory, FP8, shared memory, and the port of their rendezvous."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from common import machine_facts
from common.environment.sets import BACKEND_KEY
from common.rundir import RunDir
from launcher.batch_size import installed_path
from launcher.preflight.findings import Finding, error, warning
from recipes.memory import ADVISED_BYTES, Path, estimate
from recipes.plan import Plan
from recipes.qwen25 import QWEN25_500M

ADVISED = ADVISED_BYTES / QWEN25_500M.num_parameters  # bytes per parameter


def check_ranks(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """Check what this machine must have for the plan's ranks."""
    on_gpu = plan.accelerator == "gpu"
    gpus = machine_facts.query_gpus() if on_gpu else machine_facts.Gpus()
    names = [gpu.name for gpu in gpus.visible[: plan.devices]]
    yield from check_fp8(plan, installed_path(names) if on_gpu else None)
    if on_gpu:
        yield from check_gpu_memory(plan, gpus)
        if plan.devices > 1:
            yield from check_shared_memory(machine_facts.shared_memory(), os.environ)
    if plan.devices * plan.num_nodes > 1:
        yield from check_port(os.environ)


def model_state_bytes(plan: Plan) -> float:
    """Bytes on the fullest GPU at any batch size: weights, gradients and its share of the optimizer."""
    peak = estimate(plan)
    return peak.weights + peak.gradients + peak.optimizer


def check_gpu_memory(plan: Plan, gpus: machine_facts.Gpus) -> Iterator[Finding]:
    """Check that each rank's GPU has room for the model's states, and the advised room for its activations."""
    if plan.tensor_parallel * plan.pipeline_parallel < 1:
        return
    least = model_state_bytes(plan)
    advised = max(least, ADVISED * plan.shape.num_parameters / (plan.tensor_parallel * plan.pipeline_parallel))
    for gpu in gpus.visible[: plan.devices]:
        found = f"{gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free"
        found += f", {gpu.processes} process(es) on it" if gpu.processes else ""
        if gpu.free < least:
            yield error(
                f"GPU {gpu.index} ({gpu.name}) has too little memory free",
                expected=f"{least / 1e9:.1f} GB for weights, gradients and optimizer states",
                found=found,
                do="end what runs there (nvidia-smi), take another GPU (CUDA_VISIBLE_DEVICES), or more ranks",
            )
        elif gpu.free < advised:
            yield warning(
                f"GPU {gpu.index} ({gpu.name}) has less memory free than advised",
                expected=f"{advised / 1e9:.0f} GB for this model",
                found=found,
                do="data.micro_batch_size=1 if it runs out of memory; nvidia-smi shows what else is there",
            )


def check_fp8(plan: Plan, installed: Path | None) -> Iterator[Finding]:
    """Check that FP8 products, which train differently, can be used if they are asked for.

    A lever that they need and that is off is found where the levers are bound (training/speed.py).

    Args:
        installed: the fastest code that is installed for this machine's GPUs; None for its CPUs.
    """
    sharded = plan.tensor_parallel * plan.pipeline_parallel > 1
    here = {None: "a run on CPUs", "sdpa": "no Transformer Engine"}.get(installed, "no QuACK, or no Hopper GPU")
    if plan.fp8 and (installed != "quack" or sharded):
        yield error(
            "speed.fp8 cannot be used",
            expected="Hopper GPUs, Transformer Engine and QuACK (docs/performance.md), tensor and pipeline parallel"
            " size 1",
            found="tensor or pipeline parallelism" if sharded else here,
            do="speed.fp8=False trains in bf16; to keep it, mend what was found",
        )
    if plan.fp8_lm_head and sharded:
        yield error(
            "speed.fp8_lm_head cannot be used",
            expected="tensor and pipeline parallel size 1",
            found="tensor or pipeline parallelism",
            do="speed.fp8_lm_head=False trains in bf16; to keep it, mend what was found",
        )


def check_shared_memory(shm: machine_facts.SharedMemory, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check /dev/shm, through which NCCL's ranks on one machine exchange data unless the environment says otherwise."""
    if environ.get("NCCL_SHM_DISABLE") == "1" or environ.get(BACKEND_KEY) == "gloo":
        return
    found = f"{shm.free / 2**20:,.1f} of {shm.total / 2**20:,.1f} MiB free in {machine_facts.SHM_FOLDER}"
    do = "docker run --ipc=host (or --shm-size=8g), else --env +nccl-no-shm; python launch.py doctor tells more"
    if shm.problem:
        yield error(
            "NCCL cannot write its shared memory",
            expected=f"{machine_facts.SHM_FOLDER} writable",
            found=shm.problem,
            do=do,
        )
    elif shm.free < machine_facts.SHM_MINIMUM:
        yield error("too little shared memory for NCCL", expected="64 MiB, better 1 GiB", found=found, do=do)
    elif shm.free < machine_facts.SHM_RECOMMENDED:
        yield warning("little shared memory for NCCL", expected="1 GiB", found=found, do=do)


def check_port(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Check the port of the rendezvous, if the user has set one (otherwise the executor takes a free one)."""
    named = environ.get("MASTER_PORT")
    if named is None or "RANK" in environ:  # inside a rank: the rendezvous listens there already
        return
    if not named.isdigit() or not 0 < int(named) < 65536:
        yield error("MASTER_PORT is no port", expected="1 to 65535", found=repr(named), do="unset MASTER_PORT")
        return
    near = machine_facts.free_ports(int(named))
    if near[:1] == [int(named)]:
        return
    yield error(
        f"port {named} is taken",
        expected="MASTER_PORT free on rank 0's machine",
        found="another process listens there (`ss -ltnp` shows which)",
        do=f"MASTER_PORT={near[0]}, which is free" if near else "another MASTER_PORT: the next ones are taken too",
    )
