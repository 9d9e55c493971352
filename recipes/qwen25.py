"""The recipes. Edit the numbers here, or override one on the command line: `data.micro_batch_size=2`.

`@recipe(...)` declares a recipe's numbers (fields of recipes/plan.py) and registers the function under its name; the
first line of the docstring is what `launch.py recipes` shows. `@recipe(OTHER, ...)` declares what differs from another
recipe. The function builds NeMo-Run's configuration from the plan and may change anything in it before returning it.
Importing this file costs nothing: NeMo is imported when a recipe is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.plan import Plan, Shape
from recipes.registry import recipe

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
    """1.3M parameters, tied embeddings, from scratch on the CPU in about a minute."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(
    qwen25_tiny,
    base="models/qwen25-tiny",
    data=None,
    blend={
        "domains": [
            {"name": "code", "folder": "corpora/sample/code", "role": "new"},
            {"name": "prose", "folder": "corpora/sample/prose", "role": "replay"},
        ],
        "replay_share": 0.25,
    },
    max_steps=200,
    warmup_steps=10,
    max_lr=1e-3,
    min_lr=1e-4,
    val_check_interval=40,
    save_every_n_steps=100,
)
def qwen25_tiny_cpt(plan: Plan) -> run.Partial:
    """The tiny model continued on code, with 25% of the tokens replayed prose, on the CPU."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(
    shape=REDUCED,
    accelerator="gpu",
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
    """The reduced model (306M parameters, untied embeddings) from scratch on one GPU."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(
    shape=QWEN25_500M,
    accelerator="gpu",
    data="corpora/mine",
    seq_length=2048,
    micro_batch_size=2,
    global_batch_size=128,
    max_steps=2000,
    warmup_steps=20,
    max_lr=3e-4,
    min_lr=3e-5,
    val_check_interval=200,
    limit_val_batches=8,
    log_every_n_steps=10,
    save_every_n_steps=500,
)
def qwen25_500m(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B at full size (494M parameters, tied embeddings) from scratch on one GPU."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(
    qwen25_500m,
    base="Qwen/Qwen2.5-0.5B",
    data=None,
    blend={
        "domains": [
            {"name": "new", "folder": "corpora/new", "role": "new"},
            {"name": "replay", "folder": "corpora/replay", "role": "replay"},
        ],
        "replay_share": 0.1,
    },
    profile="gentle",
    val_check_interval=100,
    limit_val_batches=4,
    save_every_n_steps=250,
    keep_best="new",
)
def qwen25_500m_cpt(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B continued on your text, with 10% of the tokens replayed, on one GPU."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(qwen25_500m, devices=2, memory_profile="balanced")
def qwen25_500m_dual(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B from scratch on two GPUs, data parallel, about 65% of each GPU's memory."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(qwen25_500m_dual, memory_profile="conservative")
def qwen25_500m_dual_conservative(plan: Plan) -> run.Partial:
    """The same with about 48% of each GPU's memory: room for another program beside it."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(qwen25_500m_dual, memory_profile="aggressive")
def qwen25_500m_dual_aggressive(plan: Plan) -> run.Partial:
    """The same with about 90% of each GPU's memory: nothing else may run there."""
    from recipes.build.assemble import pretrain

    return pretrain(plan)


@recipe(
    qwen25_500m,
    num_nodes=2,
    devices=8,
    tensor_parallel=2,
    pipeline_parallel=2,
    virtual_pipeline=2,
    sequence_parallel=True,
    micro_batch_size=4,
    global_batch_size=256,
)
def qwen25_500m_multinode(plan: Plan) -> run.Partial:
    """Qwen2.5-0.5B on two nodes of eight GPUs: tensor groups in a node, a pipeline stage on each, four replicas.

    At 0.5B plain data parallelism is faster wherever it fits; this is the layout that larger models need.
    """
    from recipes.build.assemble import pretrain

    return pretrain(plan)
