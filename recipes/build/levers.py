"""The fast path: what `with_speed` changes in a recipe, each lever with its reason and a path that switches it back.

Applied where there is a GPU (recipes/build/adapt.py), before the user's overrides: `speed.cuda_graph=False` on the
command line wins. Every lever computes the same training (tests/training/fast/test_fast.py;
docs/measurements/same-training.md).
"""

from __future__ import annotations

from typing import Any

import nemo_run as run
from nemo.collections.llm.gpt.model.base import HAVE_TE

from recipes.build.changes import apply_changes
from training.fast import mlp, wgrad

TE_LOSS = (2, 11)  # Transformer Engine 2.9 and 2.10: wrong gradients at micro batch > 1 with an uneven mask


def levers(recipe: run.Partial) -> list[tuple[str, Any, str]]:
    """(path, value, reason) of each lever that this recipe and machine can use."""
    strategy = recipe.trainer.strategy
    one_rank = strategy.tensor_model_parallel_size * strategy.pipeline_model_parallel_size == 1
    found: list[tuple[str, Any, str]] = [
        ("model.config.bias_activation_fusion", True, "SwiGLU in one kernel"),
        ("model.config.bias_dropout_fusion", True, "the residual addition in one kernel"),
        ("speed.sync_free_loss", True, "no wait for the GPU in each micro batch"),
        ("speed.sync_free_log", True, "no wait for the GPU for numbers that are not written"),
        ("speed.fused_qkv", True, "query, key and value split and rotated in one pass"),
        ("speed.device_step", True, "clipping, AdamW and the NaN check without a wait for the GPU"),
    ]
    if HAVE_TE and _te_version() >= TE_LOSS:
        found.append(("model.config.cross_entropy_fusion_impl", "te", "Transformer Engine's loss where ours is off"))
    if HAVE_TE and getattr(recipe.data, "isolate_documents", False):
        reason = "positions start anew in each document without a wait for the GPU, where speed.fused_qkv is off"
        found.append(("model.config.apply_rope_fusion", True, reason))
    if wgrad.is_available():
        found.append(
            ("model.config.gradient_accumulation_fusion", True, "weight gradients added in the matrix product")
        )
    if one_rank:
        found.append(
            ("speed.fused_lm_head", True, "output layer and loss in one function: fewer passes over the logits")
        )
        if wgrad.is_available():
            found.append(("speed.fused_embedding", True, "the embedding's gradient added row by row"))
    if one_rank and strategy.context_parallel_size == 1:
        found.append(("speed.fused_norm", True, "residual addition and norm in one pass, forward and backward"))
        found.append(("speed.cuda_graph", True, "a micro batch is one launch, not a thousand"))
        if recipe.trainer.devices * recipe.trainer.num_nodes == 1:
            for name in ("overlap_grad_reduce", "overlap_param_gather"):
                reason = "one GPU exchanges nothing: the CUDA graph stays in one piece"
                found.append((f"trainer.strategy.ddp.{name}", False, reason))
        if HAVE_TE and mlp.is_installed():
            found.append(("speed.fused_mlp", True, "SwiGLU in the epilogues of the matrix products"))
        if HAVE_TE:
            reason = "random states that a CUDA graph can hold"
            found += [
                ("model.config.use_te_rng_tracker", True, reason),
                ("trainer.strategy.use_te_rng_tracker", True, reason),
            ]
    return found


def with_speed(recipe: run.Partial) -> list[str]:
    """Turn every usable lever on, in place.

    Returns:
        one line per change: `path: old -> new (reason)`.
    """
    return apply_changes(recipe, levers(recipe))


def _te_version() -> tuple[int, ...]:
    import transformer_engine

    return tuple(int(part) for part in transformer_engine.__version__.split(".")[:2])
