"""A recipe on another collectives backend: what must change with it, and what cannot go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import fiddle as fdl

from common.environment.sets import BACKEND_KEY
from common.errors import UserError

if TYPE_CHECKING:
    import nemo_run as run

# path in the recipe -> (value on Gloo, why); on GPU tensors Gloo has all_reduce and broadcast, and nothing scattered
_GLOO: dict[str, tuple[object, str]] = {
    "trainer.strategy.process_group_backend": ("gloo", "--env gloo"),
    "optim.config.use_distributed_optimizer": (False, "Gloo has no reduce_scatter of GPU tensors"),
    "trainer.strategy.ddp.use_distributed_optimizer": (False, "as optim.config.use_distributed_optimizer"),
    "trainer.strategy.ddp.overlap_param_gather": (False, "there are no sharded parameters to gather"),
    "trainer.strategy.ddp.overlap_grad_reduce": (False, "Gloo copies through the host: nothing runs beside it"),
    "trainer.strategy.ddp.average_in_collective": (False, "Gloo sums only; Megatron divides instead"),
}


def adapt(recipe: run.Partial, environ: Mapping[str, str]) -> list[str]:
    """Do what the environment set asks for (`gloo` sets CPT_PROCESS_GROUP_BACKEND).

    Returns:
        one line per change: `path: old -> new (reason)`.
    """
    return with_gloo(recipe) if environ.get(BACKEND_KEY) == "gloo" else []


def with_gloo(recipe: run.Partial) -> list[str]:
    """Change `recipe` in place to Gloo for all its process groups.

    Returns:
        one line per change: `path: old -> new (reason)`.
    """
    lines = []
    for path, (value, reason) in _GLOO.items():
        *owners, leaf = path.split(".")
        owner: object = recipe
        for name in owners:
            owner = getattr(owner, name, None)
        if not isinstance(owner, fdl.Buildable):  # `ddp` may be left to NeMo, whose default has none of this
            continue
        old = getattr(owner, leaf, None)
        if old is None and value is False or old == value:
            continue
        setattr(owner, leaf, value)
        lines.append(f"{path}: {old} -> {value} ({reason})")
    return lines


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
                "Gloo cannot carry this recipe on GPUs",
                expected=f"{path}=False with process_group_backend=gloo",
                found=f"{path}={value}",
                do="--env gloo, which changes what must change, or leave trainer.strategy.process_group_backend alone",
            )
