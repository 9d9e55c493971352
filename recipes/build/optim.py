"""The optimizer slot: AdamW with the plan's learning-rate schedule."""

from __future__ import annotations

import nemo_run as run
from nemo.collections.llm.recipes.optim.adam import distributed_fused_adam_with_cosine_annealing
from nemo.lightning.pytorch.optim import MegatronOptimizerModule

from recipes.build.lr_slot import StepSchedule
from recipes.plan import Plan


def adamw(plan: Plan) -> run.Config[MegatronOptimizerModule]:
    """AdamW (0.9, 0.95), weight decay 0.1, gradient clip 1.0, as large models are pretrained with."""
    optim = distributed_fused_adam_with_cosine_annealing(max_lr=plan.max_lr, clip_grad=1.0)
    optim.lr_scheduler = run.Config(StepSchedule, **plan.schedule_parameters)
    return optim


def on_cpu(optim: run.Config[MegatronOptimizerModule]) -> None:
    """fp32 without the distributed optimizer, whose state cannot be restored without Transformer Engine or Apex."""
    optim.config.bf16 = False
    optim.config.use_distributed_optimizer = False
