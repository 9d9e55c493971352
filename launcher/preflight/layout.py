"""The arithmetic of tensor, pipeline, context and data parallelism, before any GPU is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.rundir import RunDir
from launcher.preflight.findings import Finding, error, warning
from recipes.plan import Plan

_PATH = "trainer.strategy."


def check_layout(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """Check everything that must divide, and which ranks share a machine.

    Megatron numbers ranks tensor first, then context, data, pipeline: a tensor group is neighbouring ranks, a pipeline
    stage is world / PP neighbouring ranks.
    """
    sizes = (plan.tensor_parallel, plan.pipeline_parallel, plan.context_parallel, plan.virtual_pipeline or 1)
    if min(*sizes, plan.devices, plan.num_nodes, plan.micro_batch_size, plan.global_batch_size) < 1:
        return  # recipes/limits.py reports it
    world, model = plan.devices * plan.num_nodes, plan.model_parallel
    if world % model:
        yield error(
            "devices do not divide into model-parallel groups",
            expected="world size = TP x PP x CP x DP, each whole",
            found=f"{world} devices, TP x PP x CP = {model}",
            do=_devices_that_divide(plan),
        )
        return
    yield from _check_tensor_parallel(plan)
    yield from _check_machines(plan)
    yield from _check_pipeline(plan)
    if plan.isolate_documents and plan.context_parallel > 1:
        yield error(
            "isolated documents and context parallelism",
            expected="a whole sequence on one rank: documents cannot be split over context-parallel ranks here",
            found=f"data.isolate_documents=True, CP = {plan.context_parallel}",
            do=f"{_PATH}context_parallel_size=1, or data.isolate_documents=False",
        )
    if plan.accelerator == "cpu" and (plan.sequence_parallel or plan.context_parallel > 1):
        yield error(
            "no sequence or context parallelism on the CPU",
            expected="tensor, pipeline and data parallelism: only Transformer Engine's layers have the others",
            found=f"sequence_parallel={plan.sequence_parallel}, CP = {plan.context_parallel}",
            do=f"{_PATH}sequence_parallel=False {_PATH}context_parallel_size=1, or a GPU recipe",
        )


def _devices_that_divide(plan: Plan) -> str:
    """The nearest number of devices per node that makes whole groups, or no model parallelism where there is none."""
    fitting = [
        n
        for n in range(1, 2 * max(plan.devices, plan.model_parallel) + 1)
        if not n * plan.num_nodes % plan.model_parallel
    ]
    nearest = min(fitting, key=lambda n: abs(n - plan.devices))
    return f"trainer.devices={nearest}, or other parallel sizes"


def _check_tensor_parallel(plan: Plan) -> Iterator[Finding]:
    shape, tp = plan.shape, plan.tensor_parallel
    for name, whole in (
        ("attention heads", shape.num_attention_heads),
        ("query groups", shape.num_query_groups),
        ("FFN size", shape.ffn_hidden_size),
        ("vocabulary", shape.vocab_size),
    ):
        if whole % tp:
            yield error(
                f"the {name} cannot be split over the tensor-parallel ranks",
                expected=f"{name} divisible by TP = {tp}",
                found=str(whole),
                do=f"{_PATH}tensor_model_parallel_size=" + str(max(n for n in range(1, tp) if whole % n == 0)),
            )
    if plan.sequence_parallel and tp == 1:
        yield error(
            "sequence parallel without tensor parallel",
            expected="TP > 1",
            found="TP = 1: there is nothing to share the sequence with",
            do=f"{_PATH}sequence_parallel=False",
        )
    parts = 2 * plan.context_parallel if plan.context_parallel > 1 else 1
    for divisor, what in ((parts, "2 x CP"), (tp if plan.sequence_parallel else 1, "TP")):
        if plan.seq_length % divisor:
            length = max(1, plan.seq_length // divisor) * divisor
            yield error(
                "the sequence cannot be split",
                expected=f"data.seq_length divisible by {what} = {divisor}",
                found=str(plan.seq_length),
                do=f"data.seq_length={length} model.config.seq_length={length}, the same in both",
            )


def _check_machines(plan: Plan) -> Iterator[Finding]:
    if plan.num_nodes == 1:
        return
    if plan.devices % plan.tensor_parallel:
        yield error(
            "tensor-parallel groups cross machines",
            expected=f"devices per node divisible by TP = {plan.tensor_parallel}: NVLink for two all-reduces per layer",
            found=f"trainer.devices={plan.devices}",
            do=f"{_PATH}tensor_model_parallel_size={math.gcd(plan.devices, plan.tensor_parallel)}, or more pipeline"
            " stages instead",
        )
    stage = plan.devices * plan.num_nodes // plan.pipeline_parallel
    if plan.pipeline_parallel > 1 and stage % plan.devices:
        yield warning(
            "pipeline stages do not end where machines do",
            expected=f"ranks of a stage ({stage}) a multiple of devices per node ({plan.devices}): stages cross"
            " machines, which sends one activation over the network per micro batch",
            found="a machine holds parts of several stages, so that more gradients are summed across machines",
            do=f"{_PATH}pipeline_model_parallel_size={plan.num_nodes} puts one stage on each machine",
        )


def _check_pipeline(plan: Plan) -> Iterator[Finding]:
    pp, vp = plan.pipeline_parallel, plan.virtual_pipeline or 1
    if vp > 1 and pp == 1:
        yield error(
            "virtual stages without a pipeline",
            expected="PP > 1",
            found=f"PP = 1, VP = {vp}",
            do=f"{_PATH}virtual_pipeline_model_parallel_size=None",
        )
        return
    if plan.shape.num_layers % (pp * vp):
        yield error(
            "the layers do not divide into stages",
            expected=f"layers divisible by PP x VP = {pp * vp}",
            found=f"{plan.shape.num_layers} layers",
            do=f"model.config.num_layers={max(1, round(plan.shape.num_layers / (pp * vp))) * pp * vp}, or other sizes: "
            + ", ".join(str(n) for n in range(1, 9) if plan.shape.num_layers % n == 0)
            + " divide",
        )
    micro_batches = max(1, plan.num_micro_batches)
    if vp > 1 and micro_batches % pp:
        yield error(
            "virtual stages take micro batches in rounds of PP",
            expected=f"micro batches per step divisible by PP = {pp}",
            found=f"{micro_batches} = global batch / (micro batch x DP)",
            do=f"data.global_batch_size={plan.micro_batch_size * plan.data_parallel * pp} or a multiple",
        )
    idle = (pp - 1) / (micro_batches * vp + pp - 1)
    if pp > 1 and idle > 0.2:
        yield warning(
            "the pipeline is idle for too long",
            expected="at most 20% of a step: idle = (PP - 1) / (micro batches x VP + PP - 1)",
            found=f"{idle:.0%} with {micro_batches} micro batches",
            do="a larger global batch, or a smaller micro batch",
        )
