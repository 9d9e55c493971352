"""The embedding's gradient, added to Megatron's fp32 buffer row by row.

Autograd makes a gradient of the whole vocabulary in each micro batch, fills it with zeros, and Megatron adds all of it
to the buffer, although a micro batch has far fewer tokens than the vocabulary has rows.
"""

from __future__ import annotations

from typing import Any

import torch


class Embed(torch.autograd.Function):
    """weight[tokens]: int64[batch, seq] -> [batch, seq, hidden]; the gradient is added to `weight.main_grad` (fp32)."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        tokens, weight = ctx.saved_tensors
        weight.main_grad.index_add_(0, tokens.reshape(-1), grad.reshape(-1, grad.shape[-1]).float())
        weight.grad_added_to_main_grad = True  # DDP's hook then ignores the empty tensor below
        return None, torch.empty_like(weight)


def find_problem(config: Any) -> str | None:
    """Why the embedding of a model of this Megatron configuration cannot be replaced, or None."""
    if not config.gradient_accumulation_fusion:
        return "gradients are not added to Megatron's buffer: model.config.gradient_accumulation_fusion=True"
    return "rows are added in any order, and deterministic_mode asks for one" if config.deterministic_mode else None


def bind(model: Any) -> None:
    """Replace the forward of `VocabParallelEmbedding` of a built GPTModel; only for tensor parallel size 1."""
    embedding = model.embedding.word_embeddings
    sequence_first = embedding.reduce_scatter_embeddings
    # Megatron adds what autograd has for a weight shared with the output layer: that was the embedding's gradient
    embedding.weight.zero_out_wgrad = False

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = Embed.apply(tokens, embedding.weight)  # type: ignore[no-untyped-call]
        return embedded.transpose(0, 1).contiguous() if sequence_first else embedded

    embedding.forward = forward
