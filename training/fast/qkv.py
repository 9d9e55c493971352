"""Splits the fused QKV projection into rotated query, rotated key and value, in one pass forward and one backward.

Megatron splits the projection's output (interleaved by group), copies the parts that are not contiguous, rotates query
and key in a kernel each, and joins the gradients again. RoPE: arXiv 2104.09864, in the half-split form of Hugging Face
and NeMo.
"""

from __future__ import annotations

from typing import Any

import torch

from training.documents import PackedDocuments

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class SplitAndRotate(torch.autograd.Function):
    """mixed [seq, batch, groups, (heads/groups + 2) * width] -> q [seq, batch, heads, width], k, v [.., groups, width].

    cos, sin: fp32[seq, width / 2], of each token's position. Arithmetic in fp32, results in the dtype of `mixed`. Saves
    no activation.
    """

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> Parts:
        ctx.save_for_backward(cos, sin)
        ctx.shape = mixed.shape
        seq, batch, groups, _ = mixed.shape
        width = 2 * cos.shape[1]
        parts = tuple(mixed.new_empty(seq, batch, n, width) for n in (heads, groups, groups))
        if mixed.is_cuda:
            from training.fast import kernels

            kernels.qkv_rope(mixed.contiguous(), parts, cos, sin, backward=False)  # type: ignore[arg-type]
            return parts  # type: ignore[return-value]
        q, k, v = (part.flatten(2) for part in mixed.split([heads // groups * width, width, width], dim=3))
        shaped = (x.unflatten(2, (-1, width)) for x in (q, k))
        return *(_rotate(x, cos, sin) for x in shaped), v.unflatten(2, (-1, width)).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        mixed = grads[0].new_empty(ctx.shape)
        if mixed.is_cuda:
            from training.fast import kernels

            aligned = tuple(g if g.stride(3) == 1 else g.contiguous() for g in grads)
            kernels.qkv_rope(mixed, aligned, cos, sin, backward=True)  # type: ignore[arg-type]
            return mixed, None, None, None
        groups = ctx.shape[2]
        q, k, v = _rotate(grads[0], cos, -sin), _rotate(grads[1], cos, -sin), grads[2]
        torch.cat([x.flatten(2).unflatten(2, (groups, -1)) for x in (q, k, v)], dim=3, out=mixed)
        return mixed, None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [seq, batch, heads, width]."""
    first, second = x.float().chunk(2, dim=3)
    c, s = cos[:, None, None], sin[:, None, None]
    return torch.cat([first * c - second * s, second * c + first * s], dim=3).to(x.dtype)


class _CosSinTables:
    """cos and sin of the angles that GPTModel passes to every layer, computed once instead of once per layer."""

    def __init__(self) -> None:
        self.angles: torch.Tensor | None = None
        self.cos = self.sin = torch.empty(0)
        self.packed: PackedDocuments | None = None
        self.of_tokens = (torch.empty(0), torch.empty(0))

    def of(self, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of angles: fp32[seq, 1, 1, width] with two equal halves -> fp32[seq, width / 2] each."""
        if self.angles is not angles:
            half = angles[:, 0, 0, : angles.shape[3] // 2].float()
            self.angles, self.cos, self.sin = angles, half.cos().contiguous(), half.sin().contiguous()
        return self.cos, self.sin

    def of_documents(
        self, angles: torch.Tensor, packed: PackedDocuments, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at the position of each token in its document: fp32[num_tokens, width / 2] each."""
        cos, sin = self.of(angles)
        if self.packed is not packed:
            positions = packed.positions(num_tokens)
            self.packed, self.of_tokens = packed, (cos[positions], sin[positions])
        return self.of_tokens


def find_problem(config: Any) -> str | None:
    """Why a model of this Megatron configuration cannot use this module, or None."""
    if config.rotary_interleaved or config.multi_latent_attention or getattr(config, "no_rope_freq", None):
        return "it supports only the plain half-split RoPE"
    if config.qk_layernorm or config.flash_decode or config.recompute_granularity:
        return "it does not support query/key norms, flash decoding or recomputation"
    return "the head width is not a power of two" if config.kv_channels & (config.kv_channels - 1) else None


def bind(model: Any) -> None:
    """Replace the training forward of each `megatron.core.transformer.attention.SelfAttention` of a built GPTModel."""
    tables = _CosSinTables()
    for layer in model.decoder.layers:
        layer.self_attention.forward = _forward(layer.self_attention, layer.self_attention.forward, tables)


def _forward(attention: Any, original: Any, tables: _CosSinTables) -> Any:
    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """SelfAttention.forward: [seq, batch, hidden] -> [seq, batch, hidden] and the projection's bias."""
        given = {name for name, value in kwargs.items() if value is not None}
        angles, packed = kwargs.get("rotary_pos_emb"), kwargs.get("packed_seq_params")
        if isinstance(packed, PackedDocuments):
            given.remove("packed_seq_params")
        if args or given != {"rotary_pos_emb"} or not isinstance(angles, torch.Tensor):
            return original(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[no-any-return]
        mixed, _ = attention.linear_qkv(hidden_states)
        groups, heads = attention.num_query_groups_per_partition, attention.num_attention_heads_per_partition
        cos_sin = tables.of(angles) if packed is None else tables.of_documents(angles, packed, len(mixed))
        parts = SplitAndRotate.apply(mixed.unflatten(2, (groups, -1)), *cos_sin, heads)  # type: ignore[no-untyped-call]
        kind = attention.attn_mask_type
        if packed is None:
            context = attention.core_attention(*parts, attention_mask, attn_mask_type=kind)
        else:  # [tokens, 1, heads, width] without the batch, as Megatron's THD format is
            rows = (part.squeeze(1) for part in parts)
            context = attention.core_attention(*rows, attention_mask, attn_mask_type=kind, packed_seq_params=packed)
            context = context.reshape(len(mixed), 1, -1)
        return attention.linear_proj(context)  # type: ignore[no-any-return]

    return forward
