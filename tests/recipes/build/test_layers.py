"""The SDPA core attention against Megatron's own, and the CPU backend's tidiness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from recipes.build.layers import SDPACoreAttention
from training import cpu

pytestmark = pytest.mark.nemo


def _both(heads: int, groups: int, document_mask: bool) -> tuple[float, float]:
    """Largest difference of outputs and of input gradients, fp32."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(0)
    seq, batch, dim = 96, 2, 16
    with cpu.emulate_cuda():
        torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=1, hidden_size=heads * dim, num_attention_heads=heads, num_query_groups=groups,
            attention_dropout=0.0, masked_softmax_fusion=False, use_cpu_initialization=True,
        )  # fmt: skip
        causal = torch.ones(seq, seq).triu(1).bool()[None, None]
        mask = causal.clone()
        if document_mask:
            mask[..., 40:, :40] = True
        q, k, v = (torch.randn(seq, batch, n, dim) for n in (heads, groups, groups))
        out, grads = [], []
        for kind in (DotProductAttention, SDPACoreAttention):
            args = [t.clone().requires_grad_() for t in (q, k, v)]
            module = kind(config, 1, AttnMaskType.causal, "self")
            implied = kind is SDPACoreAttention and not document_mask
            result = module(*args, None if implied else mask, attn_mask_type=AttnMaskType.causal)
            result.square().sum().backward()
            out.append(result.detach())
            grads.append(torch.cat([t.grad.flatten() for t in args if t.grad is not None]))
    return float((out[0] - out[1]).abs().max()), float((grads[0] - grads[1]).abs().max() / grads[0].abs().max())


@pytest.mark.parametrize("document_mask", (False, True))
@pytest.mark.parametrize(("heads", "groups"), ((4, 2), (14, 2), (4, 4)))
def test_sdpa_equals_megatrons_attention(
    heads: int, groups: int, document_mask: bool, forked: Callable[..., Any]
) -> None:
    outputs, gradients = forked(_both, heads, groups, document_mask)
    assert outputs < 1e-5
    assert gradients < 1e-5


def test_emulate_cuda_restores_every_name() -> None:
    rows = cpu._replacements()
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in rows]
    with pytest.raises(RuntimeError, match="inside"), cpu.emulate_cuda():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
        raise RuntimeError("inside")
    assert all(getattr(owner, name, None) is value for owner, name, value in before)
