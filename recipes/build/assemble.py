"""How a plan becomes a NeMo-Run Partial: one line a slot, each slot built in recipes/build.

The base is NeMo's own `llm.qwen25_500m.pretrain_recipe`; what it gets wrong for this model
(docs/truth.md) is replaced slot by slot.
"""

from __future__ import annotations

import nemo_run as run
from nemo.collections import llm

from data.module import PreparedDataModule
from recipes.build import callbacks, checkpoint, model, optim, trainer
from recipes.plan import Plan
from training.pretrain import pretrain as train
from training.speed import Speed


def pretrain(plan: Plan) -> run.Partial:
    """A complete pretraining recipe for one or many GPUs."""
    recipe = llm.qwen25_500m.pretrain_recipe(num_gpus_per_node=plan.devices, num_nodes=plan.num_nodes, fn=train)
    recipe.model = model.qwen25(plan)
    recipe.data = run.Config(
        PreparedDataModule,
        paths=plan.data,
        blend=plan.blend,
        replay_share=plan.replay_share,
        seq_length=plan.seq_length,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size,
        num_workers=2,
        pin_memory=True,
    )
    recipe.optim = optim.adam_cosine(plan)
    recipe.trainer = trainer.megatron(plan, base=recipe.trainer)
    recipe.trainer.callbacks = callbacks.default()
    recipe.log = checkpoint.log(plan)
    recipe.resume = checkpoint.resume(plan)
    recipe.speed = run.Config(Speed)
    return recipe


def many_gpus(recipe: run.Partial) -> run.Partial:
    """Gradient sums and parameter gathers of the distributed optimizer behind the computation; attention recomputed."""
    trainer.overlap(recipe.trainer)
    if recipe.trainer.strategy.pipeline_model_parallel_size > 1:
        model.recompute(recipe.model)
    if recipe.trainer.strategy.virtual_pipeline_model_parallel_size:
        model.interleaved(recipe.model)
    return recipe


def on_cpu(recipe: run.Partial) -> run.Partial:
    """The same recipe on the CPU: fp32, Gloo, no Transformer Engine (training/cpu.py does the rest)."""
    model.on_cpu(recipe.model)
    optim.on_cpu(recipe.optim)
    trainer.on_cpu(recipe.trainer)
    recipe.data.pin_memory = False
    recipe.data.num_workers = 0  # a batch is read sooner than another process sends it
    return recipe
