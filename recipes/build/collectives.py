"""A recipe on another process-group backend: what must change with it, and what cannot be combined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import UserError
from recipes.build.changes import apply_changes
from recipes.plan import Plan

if TYPE_CHECKING:
    import nemo_run as run

# what changes on Gloo, and why: on GPU tensors Gloo has all_reduce and broadcast, but no reduce_scatter or all_gather
_GLOO: tuple[tuple[str, object, str], ...] = (
    ("trainer.strategy.process_group_backend", "gloo", "--env +gloo"),
    ("optim.config.use_distributed_optimizer", False, "Gloo has no reduce_scatter of GPU tensors"),
    ("trainer.strategy.ddp.use_distributed_optimizer", False, "as optim.config.use_distributed_optimizer"),
    ("trainer.strategy.ddp.overlap_param_gather", False, "there are no sharded parameters to gather"),
    ("trainer.strategy.ddp.overlap_grad_reduce", False, "Gloo copies through the host: nothing runs beside it"),
    ("trainer.strategy.ddp.average_in_collective", False, "Gloo sums only; Megatron divides instead"),
)


def adapt(recipe: run.Partial, plan: Plan) -> list[str]:
    """Change `recipe` in place to the plan's process-group backend, if that is Gloo on GPUs.

    Returns:
        one line per change: `path: old -> new (reason)`.
    """
    if plan.process_group_backend != "gloo" or plan.accelerator != "gpu":
        return []
    return apply_changes(recipe, _GLOO)


def check(recipe: run.Partial) -> None:
    """To be called when the overrides are in.

    Raises:
        UserError: Gloo on GPUs with what would die in its first step: the distributed optimizer's reduce_scatter, or
            gradient sums in the background.
    """
    backend = getattr(recipe.trainer.strategy, "process_group_backend", None)
    if backend != "gloo" or recipe.trainer.accelerator != "gpu":
        return
    ddp = recipe.trainer.strategy.ddp
    found = {
        "optim.config.use_distributed_optimizer": recipe.optim.config.use_distributed_optimizer,
        "trainer.strategy.ddp.overlap_grad_reduce": getattr(ddp, "overlap_grad_reduce", False),
    }
    for path, value in found.items():
        if value:
            raise UserError(
                "Gloo does not support this recipe on GPUs",
                expected=f"{path}=False with process_group_backend=gloo",
                found=f"{path}={value}",
                do="--env +gloo, which changes what must change, or leave trainer.strategy.process_group_backend alone",
            )
