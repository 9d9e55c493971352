"""Sums over all ranks of what each rank counts. Every function in this file is to be called on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared


def sum_over_ranks(counts: Sequence[int], group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
    """Sum each count over the ranks of `group`, or over all ranks.

    Returns:
        int64[len(counts)] on the device; the host does not wait for it.
    """
    sums = torch.tensor(counts, dtype=torch.int64)
    if torch.cuda.is_available():
        sums = sums.pin_memory().to(torch.cuda.current_device(), non_blocking=True)
    torch.distributed.all_reduce(sums, group=group)
    return sums


def sum_over_replicas(counts: Sequence[int]) -> torch.Tensor:
    """Sum each count over the data-parallel replicas; tensor-, pipeline- and context-parallel ranks share samples.

    Returns:
        int64[len(counts)], on the device if there are several replicas; the host does not wait for it.
    """
    if parallel_state.get_data_parallel_world_size() == 1:
        return torch.tensor(counts, dtype=torch.int64)
    return sum_over_ranks(counts, parallel_state.get_data_parallel_group())


def count_parameters(model: torch.nn.Module) -> int:
    """Count the whole model's parameters: each shard once, replicated ones once, a tied embedding once.

    Args:
        model: this rank's part (of one pipeline stage and one tensor-parallel rank).
    """
    own = sum(
        p.numel() for p in model.parameters() if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
    )
    return int(sum_over_ranks([own], parallel_state.get_model_parallel_group()).item())


def num_model_chunks() -> int:
    """This rank's model chunks (virtual pipeline stages). Each reads every micro batch from its own data iterator."""
    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
