"""Weights that replicas have updated a part of each, gathered while the next step or a validation begins.

Megatron waits for a bucket of weights before it calls the module that owns one of them. The fused norms and MLP blocks
read weights of modules that they do not call (training/fast/layers.py, mlp.py), and so does a CUDA graph. Whoever
starts a forward pass waits for the weights here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.distributed import DistributedDataParallel


def overlaps_gathers(ddp: Any) -> bool:
    """Whether the weights are gathered after the optimizer's step has returned; Megatron's `use_forward_hook`."""
    return bool(ddp.ddp_config.use_distributed_optimizer and ddp.ddp_config.overlap_param_gather)


def start_gathers(ddp: Any) -> None:
    """Start to gather all weights that are not gathered since they were updated, in the order of the forward pass."""
    if overlaps_gathers(ddp):
        for group in reversed(ddp.bucket_groups):
            if not group.param_gather_dispatched:
                group.start_param_sync()


def wait_for_gathers(ddp: Any) -> None:
    """Let the current stream wait for all weights."""
    start_gathers(ddp)
    if overlaps_gathers(ddp):
        for group in ddp.bucket_groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def finish_gathers(chunks: Iterable[Any]) -> None:
    """Let the current stream wait for all weights of a model. To be called on all ranks.

    Args:
        chunks: NeMo's MegatronParallel.
    """
    for chunk in chunks:
        if isinstance(chunk.module, DistributedDataParallel):
            wait_for_gathers(chunk.module)
