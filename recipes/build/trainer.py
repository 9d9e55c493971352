"""The trainer slot: Lightning's trainer with NeMo's Megatron strategy."""

from __future__ import annotations

import fiddle as fdl
import nemo_run as run
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from nemo import lightning as nl

from recipes.plan import Plan
from training.strategy import Strategy

# Names the stock recipe passes that MegatronStrategy does not have: **kwargs swallows them without effect.
_SWALLOWED = ("gradient_as_bucket_view", "ckpt_include_optimizer")


def megatron(plan: Plan, base: run.Config[nl.Trainer]) -> run.Config[nl.Trainer]:
    """The stock trainer with the plan's numbers; progress and logging are our own callbacks."""
    for name in _SWALLOWED:
        delattr(base.strategy, name)
    fdl.update_callable(base.strategy, Strategy)
    strategy = base.strategy
    strategy.tensor_model_parallel_size = plan.tensor_parallel
    strategy.pipeline_model_parallel_size = plan.pipeline_parallel
    strategy.virtual_pipeline_model_parallel_size = plan.virtual_pipeline
    strategy.context_parallel_size = plan.context_parallel
    strategy.sequence_parallel = plan.sequence_parallel
    strategy.pipeline_dtype = torch.bfloat16  # dtype of what pipeline stages send each other
    strategy.replace_progress_bar = False
    base.enable_progress_bar = False
    base.enable_model_summary = False
    base.max_steps = plan.max_steps
    base.check_val_every_n_epoch = None  # count the interval over the whole run, not within an epoch
    base.val_check_interval = plan.val_check_interval
    base.limit_val_batches = plan.limit_val_batches
    base.limit_test_batches = plan.limit_val_batches
    base.log_every_n_steps = plan.log_every_n_steps
    base.num_sanity_val_steps = 0
    return base


def overlap(trainer: run.Config[nl.Trainer]) -> None:
    """Overlap the distributed optimizer's communication with the forward and backward pass."""
    trainer.strategy.ddp = run.Config(
        DistributedDataParallelConfig,
        check_for_nan_in_grad=True,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        average_in_collective=True,
    )


def on_cpu(trainer: run.Config[nl.Trainer]) -> None:
    """fp32 on Gloo."""
    trainer.accelerator = "cpu"
    trainer.plugins = None
    trainer.precision = 32
    trainer.strategy.pipeline_dtype = torch.float32
    trainer.strategy.process_group_backend = "gloo"
