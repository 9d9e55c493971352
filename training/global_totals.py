"""Numbers of the whole run from what each rank holds. Every function here is called on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def total(counts: Sequence[int], group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
    """Sums over the ranks of a group, or over all: int64[len(counts)] on the device; nothing is waited for."""
    sums = torch.tensor(counts, dtype=torch.int64)
    if torch.cuda.is_available():
        sums = sums.pin_memory().to(torch.cuda.current_device(), non_blocking=True)
    torch.distributed.all_reduce(sums, group=group)
    return sums


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters of the whole model: each shard once, replicated ones once, a tied embedding once.

    Args:
        model: this rank's share (one pipeline stage's, one tensor-parallel rank's).
    """
    own = sum(
        p.numel() for p in model.parameters() if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
    )
    return int(total([own], parallel_state.get_model_parallel_group()).item())


def over_replicas(counts: Sequence[int]) -> torch.Tensor:
    """Sums over the data-parallel replicas; tensor-, pipeline- and context-parallel ranks see the same samples.

    Returns:
        int64[len(counts)], on the device where there are several replicas; nothing is waited for.
    """
    if parallel_state.get_data_parallel_world_size() == 1:
        return torch.tensor(counts, dtype=torch.int64)
    return total(counts, parallel_state.get_data_parallel_group())


def chunks() -> int:
    """Model chunks of this rank: each reads every micro batch from a data iterator of its own."""
    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
