"""Triton kernels. Imported only where there is a GPU: elsewhere Triton may not be installed."""

# no `from __future__ import annotations`: Triton reads the annotations

import torch
import triton
import triton.language as tl

_BLOCK = 8192


@triton.jit
def _cross_entropy_row(logits, stride, labels, losses, vocab, block: tl.constexpr):  # noqa: ANN001, ANN202
    log2e: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    at_label = tl.load(logits + label).to(tl.float32)
    columns = tl.arange(0, block)
    # each lane keeps a maximum and a sum of its own; lanes meet once, after the loop
    top = tl.full((block,), -1e30, tl.float32)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, vocab, block):
        x = tl.load(logits + start + columns, mask=start + columns < vocab, other=float("-inf")).to(tl.float32) * log2e
        higher = tl.maximum(top, x)
        total = total * tl.exp2(top - higher) + tl.exp2(x - higher)
        top = higher
    peak = tl.max(top, 0)
    log2_sum = peak + tl.log2(tl.sum(total * tl.exp2(top - peak), 0))
    tl.store(losses + row, log2_sum / log2e - at_label)
    for start in range(0, vocab, block):
        here = logits + start + columns
        x = tl.load(here, mask=start + columns < vocab, other=float("-inf"))
        gradient = tl.exp2(x.to(tl.float32) * log2e - log2_sum)
        gradient = tl.where(start + columns == label, gradient - 1.0, gradient)
        tl.store(here, gradient.to(x.dtype), mask=start + columns < vocab)


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """runtime.fast.lm_head.cross_entropy_ on a GPU: one program a row, two passes over it."""
    tokens, vocab = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    _cross_entropy_row[(tokens,)](logits, logits.stride(0), labels, losses, vocab, block=_BLOCK, num_warps=16)
    return losses
