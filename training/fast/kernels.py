"""Triton kernels. Imported only on a machine with a GPU; elsewhere Triton may not be installed."""

# no `from __future__ import annotations`: Triton reads the annotations. The arguments of a kernel are
# Triton's pointers and numbers, for which there are no types:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

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
    # each lane keeps its own maximum and sum; the lanes are reduced once, after the loop
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
        block_logits = logits + start + columns
        x = tl.load(block_logits, mask=start + columns < vocab, other=float("-inf"))
        gradient = tl.exp2(x.to(tl.float32) * log2e - log2_sum)
        gradient = tl.where(start + columns == label, gradient - 1.0, gradient)
        tl.store(block_logits, gradient.to(x.dtype), mask=start + columns < vocab)


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """training.fast.lm_head.cross_entropy_ on a GPU: one program per row, two passes over the row."""
    tokens, vocab = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    _cross_entropy_row[(tokens,)](logits, logits.stride(0), labels, losses, vocab, block=_BLOCK, num_warps=16)
    return losses


@triton.jit
def _qkv_rope(  # noqa: ANN202
    mixed, q, k, v, cos, sin, batch, slots, ratio, qs, qb, qh, ks, kb, kh, vs, vb, vh,  # noqa: ANN001
    half: tl.constexpr, block: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position, sample = token // batch, token % batch
    slot = tl.arange(0, block)
    lane = tl.arange(0, half)
    group, inner = slot // (ratio + 2), slot % (ratio + 2)
    row = slot < slots
    is_q = (row & (inner < ratio))[:, None] & (lane >= 0)[None, :]
    is_k = (row & (inner == ratio))[:, None] & (lane >= 0)[None, :]
    is_v = (row & (inner == ratio + 1))[:, None] & (lane >= 0)[None, :]
    c = tl.load(cos + position * half + lane)[None, :]
    s = tl.load(sin + position * half + lane)[None, :]
    c = tl.where(is_v, 1.0, c)
    s = tl.where(is_v, 0.0, s)
    at = mixed + (token * slots + slot[:, None]) * (2 * half) + lane[None, :]
    at_q = q + position * qs + sample * qb + (group * ratio + inner)[:, None] * qh + lane[None, :]
    at_k = k + position * ks + sample * kb + group[:, None] * kh + lane[None, :]
    at_v = v + position * vs + sample * vb + group[:, None] * vh + lane[None, :]
    if backward:
        y1 = tl.load(at_q, is_q, 0.0) + tl.load(at_k, is_k, 0.0) + tl.load(at_v, is_v, 0.0)
        y2 = tl.load(at_q + half, is_q, 0.0) + tl.load(at_k + half, is_k, 0.0) + tl.load(at_v + half, is_v, 0.0)
        y1, y2 = y1.to(tl.float32), y2.to(tl.float32)
        tl.store(at, (y1 * c + y2 * s).to(mixed.dtype.element_ty), row[:, None])
        tl.store(at + half, (y2 * c - y1 * s).to(mixed.dtype.element_ty), row[:, None])
    else:
        x1 = tl.load(at, row[:, None], 0.0).to(tl.float32)
        x2 = tl.load(at + half, row[:, None], 0.0).to(tl.float32)
        y1 = (x1 * c - x2 * s).to(q.dtype.element_ty)
        y2 = (x2 * c + x1 * s).to(q.dtype.element_ty)
        tl.store(at_q, y1, is_q)
        tl.store(at_q + half, y2, is_q)
        tl.store(at_k, y1, is_k)
        tl.store(at_k + half, y2, is_k)
        tl.store(at_v, y1, is_v)
        tl.store(at_v + half, y2, is_v)


def qkv_rope(
    mixed: torch.Tensor,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    backward: bool,
) -> None:
    """training.fast.qkv on a GPU: one program per token. Forward writes `parts` from `mixed`, backward the reverse."""
    q, k, v = parts
    seq, batch, heads, width = q.shape
    slots = heads + 2 * k.shape[2]
    strides = [stride for part in parts for stride in part.stride()[:3]]
    _qkv_rope[(seq * batch,)](
        mixed, q, k, v, cos, sin, batch, slots, heads // k.shape[2], *strides,
        half=width // 2, block=triton.next_power_of_2(slots), backward=backward, num_warps=4,
    )  # fmt: skip
