"""What a recipe must change on this machine, each change with its reason; the user's overrides are applied later."""

from __future__ import annotations

import nemo_run as run
import torch
from nemo.collections.llm.gpt.model.base import HAVE_TE

from recipes.build.levers import with_speed


def adapt(recipe: run.Partial, speed: bool = True) -> list[str]:
    """Change `recipe` in place to what this machine can do.

    Args:
        speed: turn the speed levers on too (recipes/build/levers.py).

    Returns:
        one line per change: `path: old -> new (reason)`.
    """
    if recipe.trainer.accelerator != "gpu" or not torch.cuda.is_available():
        return []
    lines = with_speed(recipe) if speed else []
    if HAVE_TE:
        return lines
    lines += ["layers: Megatron's local layers with SDPA attention (Transformer Engine is not installed: slower)"]
    if recipe.optim.config.use_distributed_optimizer:
        recipe.optim.config.use_distributed_optimizer = False
        lines.append(
            "optim.config.use_distributed_optimizer: True -> False"
            " (its state cannot be restored without Transformer Engine or Apex)"
        )
    ddp = recipe.trainer.strategy.ddp
    if isinstance(ddp, run.Config):
        ddp.use_distributed_optimizer = ddp.overlap_param_gather = False
        lines.append("trainer.strategy.ddp: no sharded optimizer, so no parameters to gather")
    return lines
