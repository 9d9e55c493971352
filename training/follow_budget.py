"""A forgetting budget at work: after each validation, the replay share of the samples that are still to be read."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from common.errors import GateError
from common.rundir import RunDir
from data.budget import Budget, BudgetState
from training.document_losses import load_first

log = logging.getLogger("launch")


def follow_budget(
    trainer: pl.Trainer, losses: dict[str, float], run: RunDir | None, every_n_steps: int
) -> dict[str, Any] | None:
    """Change the replay share as data/budget.py says. To be called on all ranks after a validation.

    A decision takes effect at a step none of whose samples has been asked for: the next one, and with data workers as
    many steps later as they read ahead. Nothing is decided at the last step of a run if it is not a multiple of the
    interval, so that a run which is extended later decides as one that was that long from the start.

    Args:
        losses: domain -> loss, summed over all ranks.
        run: for first-validation.npz, if the budget was given when the run was resumed.
        every_n_steps: the interval of the validation.

    Returns:
        for metrics.jsonl, by `share` the replay share that is read now, by `next_share` and `from_step` what was
        decided, by `used` the part of each budget that is used. None where the run has no budget.

    Raises:
        GateError: a domain of the budget is not validated, or the interval is no longer than what workers read ahead.
    """
    data: Any = trainer.datamodule
    budget: Budget | None = getattr(data, "budget", None)
    if budget is None or data.ledger is None:
        return None
    step = trainer.global_step
    state = data.ledger.budget or BudgetState({}, data.ledger.stage_at(step).replay_share, step)
    if budget.limits.keys() - state.base.keys():
        state = _with_base(state, budget, losses if step == 0 else _recorded_losses(run))
    used = budget.used(losses, state.base)
    row = {"share": data.ledger.stage_at(step).replay_share, "used": used}
    if step == 0 or step % every_n_steps:
        state = dataclasses.replace(state, used=used) if step == 0 else state
        data.ledger = dataclasses.replace(data.ledger, budget=state)
        return row
    ahead = data.prefetched_steps(parallel_state.get_data_parallel_world_size())
    if ahead >= every_n_steps:  # the ledger holds one decision that is still to take effect
        raise GateError(
            "the data workers read as far ahead as one validation interval",
            expected=f"trainer.val_check_interval above {ahead}",
            found=f"{every_n_steps} steps, and data.num_workers={data.num_workers}",
            do=f"trainer.val_check_interval={ahead + 1}, or data.num_workers=0",
        )
    share = _of_rank_0(budget.next_share(state.share, used, state.used))
    state = BudgetState(state.base, share, step + ahead, step, used)
    data.change_replay_share(state)
    if trainer.is_global_zero:
        parts = ", ".join(f"{name} {part:.0%}" for name, part in used.items())
        log.info("forgetting budget: used %s; replay share %.3f from step %d on", parts, share, state.first)
    return {**row, "next_share": share, "from_step": state.first}


def _with_base(state: BudgetState, budget: Budget, losses: dict[str, float]) -> BudgetState:
    """The state with the loss at step 0 of each domain that has a budget; one that it has already stays.

    Args:
        losses: of step 0, measured now or recorded then.
    """
    base = {name: losses[name] for name in budget.limits if name in losses} | state.base
    if missing := sorted(budget.limits.keys() - base.keys()):
        raise GateError(
            "a forgetting budget needs the loss at step 0",
            expected="a validation at step 0 of " + ", ".join(budget.limits),
            found="none of " + ", ".join(missing),
            do="a validation split for these domains and a new run, or data.forgetting_budget=None",
        )
    return dataclasses.replace(state, base=base)


def _recorded_losses(run: RunDir | None) -> dict[str, float]:
    """The losses of step 0 in first-validation.npz, for a budget that a resume has given or changed."""
    step, first = (load_first(run.first_validation) if run is not None else None) or (-1, {})
    return {name: float(one.losses.sum() / one.tokens.sum()) for name, one in first.items()} if step == 0 else {}


def _of_rank_0(share: float) -> float:
    """Rank 0's number on all ranks; they have computed it from the same losses, and must agree to the last bit."""
    value = torch.tensor([share], dtype=torch.float64, device=torch.cuda.current_device())
    torch.distributed.broadcast(value, 0)
    return float(value)
