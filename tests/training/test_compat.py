"""Workarounds of training/compat.py: each fails without."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def _shard_size() -> int:
    from megatron.core.dist_checkpointing.exchange_utils import _shard_size
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from training import compat

    vars(numpy).pop("product", None)  # numpy 2
    shard = ShardedTensor.from_rank_offsets("weight", torch.zeros(3, 4))
    with pytest.raises(AttributeError, match="product"):
        _shard_size(shard)
    compat.restore_numpy_product()
    return int(_shard_size(shard))


def test_megatron_asks_numpy_2_for_product(forked: Callable[..., Any]) -> None:
    assert forked(_shard_size) == 3 * 4 * 4


def _metadata_written(compatible: bool) -> list[bool]:
    """Does `.metadata` keep mcore_data when torch writes a copy of it (as torch 2.11 does)?"""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import Metadata

    from training import compat

    finish = filesystem.FileSystemWriter.finish

    def finish_with_a_copy(self: Any, metadata: Metadata, results: Any) -> None:
        finish(self, dataclasses.replace(metadata, version="2.11"), results)

    filesystem.FileSystemWriter.finish = finish_with_a_copy
    if compatible:
        compat.keep_mcore_data()
        compat.keep_mcore_data()
    found = []
    for name in ("a", "b"):
        Path(name).mkdir()
        metadata = Metadata(state_dict_metadata={})
        vars(metadata)["mcore_data"] = {"weight": {}}
        FileSystemWriterAsync(name).finish(metadata, [])
        found.append(hasattr(pickle.loads((Path(name) / ".metadata").read_bytes()), "mcore_data"))
    return found


def test_checkpoint_metadata_keeps_megatrons_data(forked: Callable[..., Any], tmp_path: Path) -> None:
    for compatible in (False, True):
        (tmp_path / str(compatible)).mkdir()
        assert forked(_metadata_written, compatible, cwd=tmp_path / str(compatible)) == [compatible, compatible]


def _resume_with_extra_state(sample: Path, ours: bool) -> int:
    """Resume where the norms have an `_extra_state`, as Transformer Engine's have, and the checkpoint has none."""
    from nemo import lightning as nl

    from training.strategy import Strategy

    torch.nn.RMSNorm.get_extra_state = lambda self: torch.empty(0, dtype=torch.uint8)
    torch.nn.RMSNorm.set_extra_state = lambda self, state: None
    if not ours:
        Strategy.load_checkpoint = nl.MegatronStrategy.load_checkpoint
    return int(train(sample, *SHORT, "trainer.max_steps=4", resume=True)[-1]["step"])


def test_a_checkpoint_without_te_restores_with_te(sample: Path, forked: Callable[..., Any]) -> None:
    forked(train, sample, *SHORT, "trainer.max_steps=2")
    with pytest.raises(RuntimeError, match="_extra_state"):
        forked(_resume_with_extra_state, sample, False)
    assert forked(_resume_with_extra_state, sample, True) == 4


def _gloo_without_coalescing() -> tuple[str, float]:
    from megatron.core.distributed import param_and_grad_buffer as buffers
    from torch import distributed

    from training import compat

    def as_on_a_gpu(*_: Any) -> None:
        raise RuntimeError("ProcessGroupGloo::allreduce_coalesced: unsupported device type cuda")

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.ProcessGroup.allreduce_coalesced = as_on_a_gpu  # type: ignore[assignment]
    group, bucket = distributed.group.WORLD, torch.ones(3)

    def sum_of_gradients() -> None:
        with buffers._coalescing_manager(group, async_ops=False):
            distributed.all_reduce(bucket, group=group)

    try:
        sum_of_gradients()
        stock = "it works"
    except RuntimeError as problem:
        stock = str(problem)
    compat.reduce_gloo_buckets_one_by_one()
    compat.reduce_gloo_buckets_one_by_one()
    sum_of_gradients()
    return stock, float(bucket.sum())


def test_gloo_sums_buckets_one_by_one(forked: Callable[..., Any]) -> None:
    stock, total = forked(_gloo_without_coalescing)
    assert "allreduce_coalesced" in stock
    assert total == 3.0


def _moved_at_the_end() -> list[str]:
    """What Strategy.teardown copies to host memory."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import strategy as lightning_strategy

    from training.strategy import Strategy

    moved: list[str] = []

    class Module(LightningModule):
        def cpu(self) -> Any:
            moved.append("weights")
            return super().cpu()

    def to_device(optimizers: list[Any], device: Any) -> None:
        moved.extend("optimizer" for _ in optimizers)

    lightning_strategy._optimizers_to_device = to_device
    strategy, module = Strategy(), Module()
    strategy.connect(module)
    strategy.optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])]
    strategy.cluster_environment, strategy.accelerator = LightningEnvironment(), CPUAccelerator()
    strategy.teardown()
    assert strategy.lightning_module is module  # Lightning's hooks that follow are given it
    return moved


def test_weights_and_optimizer_stay_on_the_gpu_at_the_end(forked: Callable[..., Any]) -> None:
    assert forked(_moved_at_the_end) == []
