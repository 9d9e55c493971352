"""The recipes. Edit the numbers here, or override one on the command line: `data.micro_batch_size=2`.

Importing this file costs nothing: NeMo is imported when a recipe is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes import profiles
from recipes.plan import Plan, Shape, recipe

if TYPE_CHECKING:
    import nemo_run as run

QWEN25_500M = Shape(
    num_layers=24,
    hidden_size=896,
    ffn_hidden_size=4864,
    num_attention_heads=14,
    num_query_groups=2,
    vocab_size=151936,
    tied=True,
)
REDUCED = Shape(
    num_layers=12,
    hidden_size=768,
    ffn_hidden_size=2048,
    num_attention_heads=12,
    num_query_groups=2,
    vocab_size=151936,
    tied=False,
)
TINY = Shape(
    num_layers=4,
    hidden_size=128,
    ffn_hidden_size=352,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=4096,
    tied=True,
)


@recipe(
    shape=TINY,
    accelerator="cpu",
    env="cpu",
    distributed_optimizer=False,
    data="corpora/sample/prose",
    seq_length=256,
    micro_batch_size=4,
    global_batch_size=4,
    max_steps=400,
    warmup_steps=20,
    max_lr=2e-3,
    min_lr=2e-4,
    val_check_interval=100,
    limit_val_batches=8,
    log_every_n_steps=20,
    save_every_n_steps=200,
)
def qwen25_tiny(plan: Plan) -> run.Partial:
    """A 1.3M-parameter Qwen2.5 on the CPU: the whole path, from scratch, in about a minute."""
    from recipes.build.assemble import on_cpu, pretrain

    return on_cpu(pretrain(plan))


@recipe(
    shape=TINY,
    base="models/qwen25-tiny",
    accelerator="cpu",
    env="cpu",
    distributed_optimizer=False,
    blend={
        "domains": [
            {"name": "code", "folder": "corpora/sample/code", "role": "new"},
            {"name": "prose", "folder": "corpora/sample/prose", "role": "replay"},
        ],
        "replay_share": 0.25,
    },
    seq_length=256,
    micro_batch_size=4,
    global_batch_size=4,
    max_steps=200,
    warmup_steps=10,
    max_lr=1e-3,
    min_lr=1e-4,
    val_check_interval=40,
    limit_val_batches=8,
    log_every_n_steps=20,
    save_every_n_steps=100,
)
def qwen25_tiny_cpt(plan: Plan) -> run.Partial:
    """Continue the tiny model on code, with prose replayed, on the CPU."""
    from recipes.build.assemble import on_cpu, pretrain

    return on_cpu(pretrain(plan))


@recipe(
    shape=REDUCED,
    accelerator="gpu",
    env="official",
    data="corpora/mine",
    seq_length=2048,
    micro_batch_size=1,
    global_batch_size=4,
    max_steps=1000,
    warmup_steps=100,
    max_lr=3e-4,
    min_lr=3e-5,
    val_check_interval=200,
    limit_val_batches=32,
    log_every_n_steps=10,
    save_every_n_steps=500,
)
def qwen25_500m_single(plan: Plan) -> run.Partial:
    """The reduced model (306M, untied) on one GPU, sequence 2048, global batch 4."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


# the full-size model from scratch, on whatever number of GPUs
_FULL = {
    "shape": QWEN25_500M,
    "accelerator": "gpu",
    "data": "corpora/mine",
    "seq_length": 2048,
    "max_steps": 2000,
    "warmup_steps": 20,
    "max_lr": 3e-4,
    "min_lr": 3e-5,
    "val_check_interval": 200,
    "limit_val_batches": 8,
    "log_every_n_steps": 10,
    "save_every_n_steps": 500,
}


@recipe(env="official", micro_batch_size=2, global_batch_size=128, **_FULL)
def qwen25_500m(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B at full size, tied embeddings (494M), on one GPU."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(
    shape=QWEN25_500M,
    base="Qwen/Qwen2.5-0.5B",
    accelerator="gpu",
    env="official",
    blend={
        "domains": [
            {"name": "new", "folder": "corpora/new", "role": "new"},
            {"name": "replay", "folder": "corpora/replay", "role": "replay"},
        ],
        "replay_share": 0.1,
    },
    seq_length=2048,
    micro_batch_size=2,
    global_batch_size=128,
    val_check_interval=100,
    limit_val_batches=4,
    log_every_n_steps=10,
    save_every_n_steps=250,
    keep_best="new",
    **profiles.numbers("gentle", 2000),
)
def qwen25_500m_cpt(plan: Plan) -> run.Partial:
    """Continue Qwen2.5-0.5B on your text, with replay: full model, one GPU, profile gentle."""
    from recipes.build.assemble import pretrain

    return profiles.with_profile(pretrain(plan), "gentle", plan.max_steps)


# the batch is for an 80 GiB card; the launcher fits it to the card that is there (recipes/memory.py)
@recipe(env="dual", devices=2, memory_profile="balanced", micro_batch_size=17, global_batch_size=136, **_FULL)
def qwen25_500m_dual(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B at full size (494M, tied) on two GPUs, data parallel: about 65% of each card."""
    from recipes.build.assemble import many_gpus, pretrain

    return many_gpus(pretrain(plan))


@recipe(env="dual", devices=2, memory_profile="conservative", micro_batch_size=12, global_batch_size=72, **_FULL)
def qwen25_500m_dual_conservative(plan: Plan) -> run.Partial:
    """The same with about 48% of each card: room for another program beside it."""
    from recipes.build.assemble import many_gpus, pretrain

    return many_gpus(pretrain(plan))


@recipe(env="dual", devices=2, memory_profile="aggressive", micro_batch_size=25, global_batch_size=250, **_FULL)
def qwen25_500m_dual_aggressive(plan: Plan) -> run.Partial:
    """The same with about 90% of each card: nothing else may run there."""
    from recipes.build.assemble import many_gpus, pretrain

    return many_gpus(pretrain(plan))


@recipe(
    env="multinode-ib",
    num_nodes=2,
    devices=8,
    tensor_parallel=2,
    pipeline_parallel=2,
    virtual_pipeline=2,
    sequence_parallel=True,
    micro_batch_size=4,
    global_batch_size=256,
    **_FULL,
)
def qwen25_500m_multinode(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B on two nodes of eight: tensor groups inside a node, a pipeline stage on each, four replicas.

    At 0.5B plain data parallelism is faster wherever it fits; this is the shape that larger models need.
    """
    from recipes.build.assemble import many_gpus, pretrain

    return many_gpus(pretrain(plan))
