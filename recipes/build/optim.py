"""The optimizer slot: AdamW with warm-up and cosine decay."""

from __future__ import annotations

import nemo_run as run
from nemo.collections.llm.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo.lightning.pytorch.optim import MegatronOptimizerModule

from recipes.build.lr_slot import StepSchedule
from recipes.plan import Plan


def adam_cosine(plan: Plan) -> run.Config[MegatronOptimizerModule]:
    """AdamW (0.9, 0.95), weight decay 0.1, gradient clip 1.0; linear warm-up, cosine to `min_lr` at the plan's end.

    The schedule keeps that length when trainer.max_steps is changed (recipes/build/lr_slot.py).
    """
    optim = distributed_fused_adam_with_cosine_annealing(max_lr=plan.max_lr, clip_grad=1.0)
    optim.lr_scheduler = run.Config(
        StepSchedule,
        kind="rewarm_cosine",
        warmup_steps=plan.warmup_steps,
        min_lr=plan.min_lr,
        decay_end=plan.max_steps,
    )
    return optim


def on_cpu(optim: run.Config[MegatronOptimizerModule]) -> None:
    """fp32 without the distributed optimizer, which cannot resume without TE or Apex (shared fact, tested)."""
    optim.config.bf16 = False
    optim.config.use_distributed_optimizer = False
