"""How a plan becomes NeMo-Run's configuration: one line per slot, each slot built by its own module beside this one.

The trainer starts from that of NeMo's own recipe, `llm.qwen25_500m.pretrain_recipe`; every other slot of that recipe
is wrong for this model (docs/truth.md). Its file is not imported: it brings fine-tuning and its datasets (2 s).
"""

from __future__ import annotations

import nemo_run as run
from nemo.collections.llm.recipes.qwen2 import qwen2_trainer

from data.module import PreparedDataModule
from recipes.build import callbacks, checkpoint, model, optim, trainer
from recipes.plan import Plan
from training.evaluation import EvaluateCheckpoints
from training.pretrain import pretrain as train
from training.speed import Speed


def pretrain(plan: Plan) -> run.Partial:
    """The complete configuration of a run on a CPU, one GPU or many, as the plan says."""
    stock = qwen2_trainer(tensor_parallelism=1, num_gpus_per_node=plan.devices, num_nodes=plan.num_nodes)
    recipe = run.Partial(
        train,
        model=model.qwen25(plan),
        data=run.Config(
            PreparedDataModule,
            paths=plan.data,
            blend=plan.blend,
            replay_share=plan.replay_share,
            seq_length=plan.seq_length,
            micro_batch_size=plan.micro_batch_size,
            global_batch_size=plan.global_batch_size,
            num_workers=2,
            pin_memory=True,
        ),
        optim=optim.adamw(plan),
        trainer=trainer.megatron(plan, base=stock),
        log=checkpoint.log(plan),
        resume=checkpoint.resume(plan),
        speed=run.Config(Speed),
        evaluate=run.Config(EvaluateCheckpoints),
    )
    recipe.trainer.callbacks = callbacks.default()
    if plan.isolate_documents:  # else unset, so that configurations written before it existed are the same
        recipe.data.isolate_documents = True
    if plan.forgetting_budget is not None:
        recipe.data.forgetting_budget, recipe.data.replay_bounds = plan.forgetting_budget, plan.replay_bounds
    if plan.accelerator == "cpu":
        _for_cpu(recipe)
    elif plan.world_size > 1:
        _for_many_gpus(recipe, plan)
    return recipe


def _for_many_gpus(recipe: run.Partial, plan: Plan) -> None:
    """Communication of the distributed optimizer overlaps the computation; pipeline stages recompute attention."""
    trainer.overlap(recipe.trainer)
    if plan.pipeline_parallel > 1:
        model.recompute(recipe.model)
    if plan.virtual_pipeline:
        model.interleaved(recipe.model)


def _for_cpu(recipe: run.Partial) -> None:
    """fp32, Gloo, no Transformer Engine (training/cpu.py does the rest)."""
    model.on_cpu(recipe.model)
    optim.on_cpu(recipe.optim)
    trainer.on_cpu(recipe.trainer)
    recipe.data.pin_memory = False
    recipe.data.num_workers = 0  # reading a batch here takes less time than receiving it from a worker process
