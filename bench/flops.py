"""Floating-point operations per trained token: one function for every model and for the peer."""

from __future__ import annotations

from recipes.plan import Shape


def flops_per_token(shape: Shape, seq_length: int) -> int:
    """FLOPs of forward and backward per token: 2 per multiply-add, the backward pass twice the forward.

    Counted: every matrix product with a weight (with the output layer, without the embedding's look-up), and causal
    attention's two products over half of seq_length^2. Not counted: softmax, norms, activations, the optimizer, and
    anything that is recomputed.

    Source: PaLM (arXiv 2204.02311) appendix B, with causal attention halved.
    """
    head_dim = shape.hidden_size // shape.num_attention_heads
    attention_width = shape.num_attention_heads * head_dim
    qkv = (shape.num_attention_heads + 2 * shape.num_query_groups) * head_dim
    layer = shape.hidden_size * (qkv + attention_width + 3 * shape.ffn_hidden_size)
    weights = shape.num_layers * layer + shape.vocab_size * shape.hidden_size
    attention = shape.num_layers * 2 * seq_length * attention_width // 2
    return 6 * (weights + attention)
