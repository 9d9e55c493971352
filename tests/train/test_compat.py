"""Workarounds of runtime/compat.py: each fails without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest


def _shard_size() -> int:
    import torch
    from megatron.core.dist_checkpointing.exchange_utils import _shard_size
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from runtime import compat

    vars(numpy).pop("product", None)  # numpy 2
    shard = ShardedTensor.from_rank_offsets("weight", torch.zeros(3, 4))
    with pytest.raises(AttributeError, match="product"):
        _shard_size(shard)
    compat.numpy_product()
    return int(_shard_size(shard))


def test_megatron_asks_numpy_2_for_product(forked: Callable[..., Any]) -> None:
    assert forked(_shard_size) == 3 * 4 * 4
