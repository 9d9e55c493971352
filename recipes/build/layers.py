"""Transformer layers: Transformer Engine where it is, otherwise Megatron's local layers with SDPA attention.

Megatron's own attention without TE writes out the full score matrix; torch's SDPA does not, and is
2-3 times faster on a CPU. Both compute softmax(QK^T / sqrt(d)) V.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from nemo.collections.llm.gpt.model.base import HAVE_TE, transformer_engine_layer_spec

from training.documents import PackedDocuments


class SDPACoreAttention(MegatronModule):
    """Causal scaled-dot-product attention with grouped queries, through torch's SDPA kernels.

    Drop-in for `megatron.core.transformer.dot_product_attention.DotProductAttention`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1 or config.window_size is not None:
            raise ValueError("SDPA attention has no context parallelism and no sliding window: use Transformer Engine")
        self.causal = attn_mask_type == AttnMaskType.causal
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        if config.apply_query_key_layer_scaling:
            self.scale /= max(1, layer_number)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedDocuments | None = None,
    ) -> torch.Tensor:
        """Attention over one tensor-parallel rank's heads.

        Args:
            query: [seq, batch, heads, head_dim]; of isolated documents, [tokens of all samples, heads, head_dim].
            key, value: as query, with groups, which divides heads.
            attention_mask: bool[batch or 1, 1, seq, seq], True where attention is forbidden (Megatron's
                convention), or None for plain causal attention.
            packed_seq_params: the borders of isolated documents.

        Returns:
            [seq, batch, heads * head_dim]; of isolated documents, [tokens of all samples, heads * head_dim].
        """
        if attention_bias is not None:
            raise NotImplementedError("attention bias needs Transformer Engine")
        if packed_seq_params is not None:
            return self._within_documents(query, key, value, packed_seq_params)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        causal = self.causal if attn_mask_type is None else attn_mask_type == AttnMaskType.causal
        allowed = None if attention_mask is None else ~attention_mask
        out = self._attend(q, k, v, allowed, causal and attention_mask is None)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _within_documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedDocuments
    ) -> torch.Tensor:
        """Each sample of the row by itself, under the mask of its documents."""
        q, k, v = (x.unflatten(0, (-1, packed.max_seqlen_q)).transpose(1, 2) for x in (query, key, value))
        out = self._attend(q, k, v, packed.block_mask(len(query)), False)
        return out.transpose(1, 2).reshape(len(query), -1)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """q: [batch, heads, seq, head_dim]; k, v: [batch, groups, ...]; allowed: bool, as torch has it."""
        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=allowed,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=k.shape[1] != q.shape[1],
        )


def local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local layer (no TE, no Apex) with SDPA attention."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return spec


def auto_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Transformer Engine's layer if TE is installed, else the local one."""
    return transformer_engine_layer_spec(config) if HAVE_TE else local_layer_spec(config)
