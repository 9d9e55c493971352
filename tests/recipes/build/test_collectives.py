"""`--env +gloo` reaches the recipe; Gloo with the distributed optimizer on GPUs is refused."""

from __future__ import annotations

import dataclasses

import nemo_run as run
import pytest
from megatron.core.distributed import DistributedDataParallelConfig

from common.errors import UserError
from recipes import overrides, registry
from recipes.build import collectives

pytestmark = pytest.mark.nemo


def test_gloo_changes_what_it_cannot_carry() -> None:
    recipe = registry.resolve("qwen25_500m")()
    plan = registry.resolve("qwen25_500m").plan
    assert collectives.adapt(recipe, plan) == []
    recipe.trainer.strategy.ddp = run.Config(
        DistributedDataParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True, average_in_collective=True
    )
    recipe.optim.config.use_distributed_optimizer = True
    lines = collectives.adapt(recipe, dataclasses.replace(plan, process_group_backend="gloo"))
    assert recipe.trainer.strategy.process_group_backend == "gloo"
    assert not recipe.optim.config.use_distributed_optimizer
    ddp = recipe.trainer.strategy.ddp
    assert not (ddp.overlap_grad_reduce or ddp.overlap_param_gather or ddp.average_in_collective)
    assert len(lines) == 5 and all("->" in line and "(" in line for line in lines)
    collectives.check(recipe)


@pytest.mark.parametrize("path", ["optim.config.use_distributed_optimizer", "trainer.strategy.ddp.overlap_grad_reduce"])
def test_gloo_by_hand_is_refused_with_what_it_cannot_carry(path: str) -> None:
    recipe = registry.resolve("qwen25_500m_dual")()
    collectives.check(recipe)
    plan = registry.resolve("qwen25_500m_dual").plan
    collectives.adapt(recipe, dataclasses.replace(plan, process_group_backend="gloo"))
    collectives.check(recipe)
    overrides.apply_to_recipe(recipe, overrides.parse([f"{path}=True"]))
    with pytest.raises(UserError, match=r"--env \+gloo") as refused:
        collectives.check(recipe)
    assert f"{path}=True" in refused.value.explain()


def test_the_cpu_recipe_has_nothing_to_change() -> None:
    recipe = registry.resolve("qwen25_tiny")()
    assert collectives.adapt(recipe, registry.resolve("qwen25_tiny").plan) == []
    collectives.check(recipe)
