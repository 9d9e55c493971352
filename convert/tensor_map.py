"""The mapping between Hugging Face's Qwen2 tensors and Megatron's: import, export and verify all read this table.

Megatron stacks a tensor of all layers into one along dimension 0; names are those of a distributed checkpoint
without its leading `module.`. They are the same with and without Transformer Engine: the local layers save
their norms under the names of TE's fused layers (`sharded_state_dict_keys_map` in
megatron/core/models/gpt/gpt_layer_specs.py, 0.12 and 0.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch

from recipes.plan import Shape

LAYER = "model.layers.{i}."
Kind = Literal["same", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True, kw_only=True)
class Architecture(Shape):
    """Everything besides the weights that decides a Qwen2 model's logits: its shape and three more numbers."""

    head_dim: int
    norm_eps: float
    rope_theta: float

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, for any `head_dim`; a tied output layer counts once."""
        return sum(torch.Size(shape).numel() for shape in hf_shapes(self).values())

    def differences(self, other: Architecture) -> list[str]:
        """`field: own value, other's value` for every field that differs."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name}: {own}, {others}" for name, own, others in pairs if own != others]


@dataclass(frozen=True)
class Row:
    """One Megatron tensor and the HF tensors it is made of; `{i}` in a name stands for the layer."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "same"

    @property
    def per_layer(self) -> bool:
        """Every layer has such a tensor."""
        return "{i}" in self.hf[0]


def _layer(megatron: str, *hf: str, kind: Kind = "same") -> Row:
    return Row(f"decoder.layers.{megatron}", tuple(LAYER + name for name in hf), kind)


def _attention(*letters: str, of: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{letter}_proj.{of}" for letter in letters)


EMBEDDING = Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab")
OUTPUT = Row("output_layer.weight", ("lm_head.weight",), "vocab")
BODY = (
    _layer("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    _layer("self_attention.linear_qkv.weight", *_attention("q", "k", "v", of="weight"), kind="qkv"),
    _layer("self_attention.linear_qkv.bias", *_attention("q", "k", "v", of="bias"), kind="qkv"),
    _layer("self_attention.linear_proj.weight", *_attention("o", of="weight")),
    _layer("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    _layer("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", kind="gate_up"),
    _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
)


def rows(arch: Architecture) -> tuple[Row, ...]:
    """The table for this model: a tied one has no output layer of its own."""
    return (EMBEDDING, *BODY) if arch.tied else (EMBEDDING, *BODY, OUTPUT)


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every HF tensor of the model, in the table's order, with its shape."""
    q, kv = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
    vocab, hidden, ffn = arch.vocab_size, arch.hidden_size, arch.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        LAYER + "input_layernorm.weight": (hidden,),
        LAYER + "post_attention_layernorm.weight": (hidden,),
        LAYER + "self_attn.o_proj.weight": (hidden, q),
        LAYER + "mlp.gate_proj.weight": (ffn, hidden),
        LAYER + "mlp.up_proj.weight": (ffn, hidden),
        LAYER + "mlp.down_proj.weight": (hidden, ffn),
    }
    for letter, size in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{LAYER}self_attn.{letter}_proj.weight"] = (size, hidden)
        shapes[f"{LAYER}self_attn.{letter}_proj.bias"] = (size,)
    return {name.format(i=i): shapes[name] for name, i in _hf_order(arch)}


def _hf_order(arch: Architecture) -> Iterator[tuple[str, int]]:
    for row in rows(arch):
        for i in range(arch.num_layers if row.per_layer else 1):
            yield from ((name, i) for name in row.hf)


def megatron_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every Megatron tensor with its stacked shape; the vocabulary is not padded."""
    hf = hf_shapes(arch)
    shapes = {}
    for row in rows(arch):
        parts = [hf[name.format(i=0)] for name in row.hf]
        joined = (sum(part[0] for part in parts), *parts[0][1:])
        shapes[row.megatron] = (arch.num_layers, *joined) if row.per_layer else joined
    return shapes


def to_megatron(arch: Architecture, hf: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(Megatron name, stacked tensor) for every row of the table, in the dtype of the source.

    Args:
        hf: returns the HF tensor of that name.
    """
    for row in rows(arch):
        layers = range(arch.num_layers if row.per_layer else 1)
        joined = (_join(row.kind, arch, [hf(name.format(i=i)) for name in row.hf]) for i in layers)
        yield row.megatron, torch.stack(list(joined)) if row.per_layer else next(joined)


def to_hf(arch: Architecture, megatron: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) in the order of `hf_shapes`, in the dtype of the source.

    Args:
        megatron: returns the stacked Megatron tensor of that name.
    """
    for row in rows(arch):
        stacked = megatron(row.megatron)
        for i in range(arch.num_layers if row.per_layer else 1):
            parts = _split(row.kind, arch, stacked[i] if row.per_layer else stacked)
            yield from zip((name.format(i=i) for name in row.hf), parts, strict=True)


def _join(kind: Kind, arch: Architecture, parts: list[torch.Tensor]) -> torch.Tensor:
    if kind == "qkv":
        return interleave_qkv(arch, *parts)
    return torch.cat(parts) if kind == "gate_up" else parts[0]


def _split(kind: Kind, arch: Architecture, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if kind == "qkv":
        return split_qkv(arch, joined)
    if kind == "gate_up":
        return joined.chunk(2)
    return (joined[: arch.vocab_size],) if kind == "vocab" else (joined,)


def interleave_qkv(arch: Architecture, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Joins q, k and v in Megatron's order: for each group its query heads, then its key head, then its value head.

    Args:
        q: [heads * head_dim, ...]; k, v: [groups * head_dim, ...]; a trailing dimension for weights, none for biases.

    Returns:
        [(heads + 2 * groups) * head_dim, ...].
    """
    by_group = [x.reshape(arch.num_query_groups, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(by_group, dim=1).reshape(-1, *q.shape[1:])


def split_qkv(arch: Architecture, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inverse of `interleave_qkv`: q, k, v."""
    grouped = qkv.reshape(arch.num_query_groups, -1, *qkv.shape[1:])
    queries = arch.num_attention_heads // arch.num_query_groups * arch.head_dim
    q, k, v = torch.split(grouped, [queries, arch.head_dim, arch.head_dim], dim=1)
    return tuple(part.reshape(-1, *qkv.shape[1:]) for part in (q, k, v))
