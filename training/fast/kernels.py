"""Triton kernels. Imported only on a machine with a GPU; elsewhere Triton may not be installed."""

# no `from __future__ import annotations`: Triton reads the annotations. The arguments of a kernel are
# Triton's pointers and numbers, for which there are no types:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 16384


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
        # most of the row is still in the L2 cache, and neither it nor its gradient is read again by this kernel
        x = tl.load(block_logits, start + columns < vocab, float("-inf"), eviction_policy="evict_first")
        gradient = tl.exp2(x.to(tl.float32) * log2e - log2_sum)
        gradient = tl.where(start + columns == label, gradient - 1.0, gradient)
        tl.store(block_logits, gradient.to(x.dtype), start + columns < vocab, cache_modifier=".cs")


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """training.fast.lm_head.cross_entropy_ on a GPU: one program per row, two passes over the row."""
    tokens, vocab = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    # 32 warps: one program per multiprocessor, so that the rows being read fit into the L2 cache together
    _cross_entropy_row[(tokens,)](logits, logits.stride(0), labels, losses, vocab, block=_BLOCK, num_warps=32)
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


@triton.jit
def _adamw(  # noqa: ANN202
    addresses, sizes, block_tensor, block_start, divisor, skip,  # noqa: ANN001
    lr, beta1, beta2, epsilon, decay, correction1, sqrt_correction2,  # noqa: ANN001
    aligned: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0.0:
        return
    tensor = tl.load(block_tensor + tl.program_id(0))
    at = tl.load(block_start + tl.program_id(0)) + tl.arange(0, block)
    inside = at < tl.load(sizes + tensor)
    weights = tl.load(addresses + 5 * tensor).to(tl.pointer_type(tl.float32)) + at
    firsts = tl.load(addresses + 5 * tensor + 1).to(tl.pointer_type(tl.float32)) + at
    seconds = tl.load(addresses + 5 * tensor + 2).to(tl.pointer_type(tl.float32)) + at
    gradients = tl.load(addresses + 5 * tensor + 3).to(tl.pointer_type(tl.float32)) + at
    copies = tl.load(addresses + 5 * tensor + 4).to(tl.pointer_type(tl.bfloat16)) + at
    if aligned:  # 16 bytes, so that four numbers are read at once
        weights = tl.multiple_of(weights, 16)
        firsts = tl.multiple_of(firsts, 16)
        seconds = tl.multiple_of(seconds, 16)
        gradients = tl.multiple_of(gradients, 16)
        copies = tl.multiple_of(copies, 16)
    gradient = tl.load(gradients, inside, 0.0) / tl.load(divisor)
    weight = tl.load(weights, inside, 0.0)
    weight -= lr * decay * weight
    first = beta1 * tl.load(firsts, inside, 0.0) + (1 - beta1) * gradient
    second = beta2 * tl.load(seconds, inside, 0.0) + (1 - beta2) * gradient * gradient
    weight -= lr / correction1 * first / (tl.sqrt(second) / sqrt_correction2 + epsilon)
    tl.store(weights, weight, inside)
    tl.store(firsts, first, inside)
    tl.store(seconds, second, inside)
    tl.store(copies, weight.to(tl.bfloat16), inside)


class AdamWTensors:
    """The tensors of one parameter group, for one launch over all of them.

    Args:
        rows: (weight, first moment, second moment, gradient: fp32; copy: bf16) of each parameter, contiguous and of
            one size. They are kept by address: if `moved` says so, make another object.
    """

    BLOCK = 1024  # elements per program; larger ones spill registers (2048: 9% slower, 4096: 16 times)

    def __init__(self, rows: Sequence[tuple[torch.Tensor, ...]]) -> None:
        device = rows[0][0].device
        self._addresses = [[x.data_ptr() for x in row] for row in rows]
        sizes = [row[0].numel() for row in rows]
        blocks = [(i, start) for i, size in enumerate(sizes) for start in range(0, size, self.BLOCK)]
        self._aligned = not any(address % 16 for row in self._addresses for address in row)
        self._arguments = (
            torch.tensor(self._addresses, dtype=torch.int64, device=device),
            torch.tensor(sizes, dtype=torch.int64, device=device),
            torch.tensor([i for i, _ in blocks], dtype=torch.int32, device=device),
            torch.tensor([start for _, start in blocks], dtype=torch.int64, device=device),
        )

    def moved(self, rows: Sequence[tuple[torch.Tensor, ...]]) -> bool:
        """Whether a tensor is at another address than when this object was made."""
        return [[x.data_ptr() for x in row] for row in rows] != self._addresses

    def step(
        self,
        divisor: torch.Tensor,
        skip: torch.Tensor,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """One step of AdamW (arXiv 1711.05101) with gradient / divisor, and the copies; nothing if skip is not 0.

        The same numbers as `torch._fused_adamw_` (tests/gpu/test_fast_gpu.py). divisor, skip: fp32 scalars on the GPU.
        """
        corrections = 1 - betas[0] ** step, (1 - betas[1] ** step) ** 0.5
        _adamw[(len(self._arguments[2]),)](
            *self._arguments, divisor, skip, lr, *betas, eps, weight_decay, *corrections,
            aligned=self._aligned, block=self.BLOCK, num_warps=4,
        )  # fmt: skip


@triton.jit
def _add_norm(  # noqa: ANN202
    residual, delta, weight, total, normed, inverses, rows, width, epsilon,  # noqa: ANN001
    added: tl.constexpr, at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)
    column = tl.arange(0, block)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    x = tl.load(residual + at, inside, 0.0).to(tl.float32)
    if added:
        x = (x + tl.load(delta + at, inside, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, x, inside)
        x = x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + epsilon)
    tl.store(inverses + row, inverse, row < rows)
    w = tl.load(weight + column, column < width, 0.0).to(tl.float32)
    tl.store(normed + at, (x * inverse[:, None] * w[None, :]).to(normed.dtype.element_ty), inside)


@triton.jit
def _add_norm_backward(  # noqa: ANN202
    dtotal, dnormed, total, weight, inverses, dx, partial, rows, width,  # noqa: ANN001
    added: tl.constexpr, at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block)
    w = tl.load(weight + column, column < width, 0.0).to(tl.float32)[None, :]
    dweight = tl.zeros((block,), tl.float32)
    for first in range(tl.program_id(0) * at_once, rows, tl.num_programs(0) * at_once):
        row = (first + tl.arange(0, at_once)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None] * width + column[None, :]
        inverse = tl.load(inverses + row, row < rows, 0.0)[:, None]
        x = tl.load(total + at, inside, 0.0).to(tl.float32) * inverse
        dy = tl.load(dnormed + at, inside, 0.0).to(tl.float32)
        dweight += tl.sum(dy * x, 0)
        dy *= w
        gradient = (dy - x * (tl.sum(dy * x, 1) / width)[:, None]) * inverse
        if added:
            gradient += tl.load(dtotal + at, inside, 0.0).to(tl.float32)
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), inside)
    tl.store(partial + tl.program_id(0) * width + column, dweight, column < width)


@triton.jit
def _partial_column_sums(x, partial, rows, width, at_once: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
    column = tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros((at_once, block), tl.float32)  # summed over its rows once, after the loop
    for first in range(tl.program_id(0) * at_once, rows, tl.num_programs(0) * at_once):
        row = (first + tl.arange(0, at_once)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(x + row[:, None] * width + column[None, :], inside, 0.0).to(tl.float32)
    tl.store(partial + tl.program_id(0) * width + column, tl.sum(total, 0), column < width)


@triton.jit
def _add_column_sums(partial, out, rows, width, at_once: tl.constexpr, block: tl.constexpr):  # noqa: ANN001, ANN202
    column = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for first in range(0, rows, at_once):
        row = first + tl.arange(0, at_once)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.sum(tl.load(partial + row[:, None] * width + column[None, :], inside, 0.0), 0)
    tl.store(out + column, tl.load(out + column, column < width, 0.0) + total, column < width)


_PROGRAMS = 528  # four for each multiprocessor of an H100
_ROWS_AT_ONCE = 4


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """training.fast.layers.AddNorm on a GPU, forward.

    residual, delta: contiguous [rows, width]; weight: [width]. Returns total and normed (as residual), and the inverse
    root mean squares (fp32[rows]).
    """
    rows, width = residual.shape
    total = residual if delta is None else torch.empty_like(residual)
    normed, inverses = torch.empty_like(residual), residual.new_empty(rows, dtype=torch.float32)
    _add_norm[(triton.cdiv(rows, _ROWS_AT_ONCE),)](
        residual, delta, weight, total, normed, inverses, rows, width, epsilon,
        added=delta is not None, at_once=_ROWS_AT_ONCE, block=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return total, normed, inverses


def add_norm_backward(
    dtotal: torch.Tensor | None,
    dnormed: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    inverses: torch.Tensor,
    dweight: torch.Tensor,
) -> torch.Tensor:
    """training.fast.layers.AddNorm on a GPU, backward: returns d(residual), and adds d(weight) to `dweight` (fp32)."""
    rows, width = total.shape
    dx = torch.empty_like(total)
    partial = total.new_empty(_PROGRAMS, width, dtype=torch.float32)
    _add_norm_backward[(_PROGRAMS,)](
        dtotal, dnormed, total, weight, inverses, dx, partial, rows, width,
        added=dtotal is not None, at_once=_ROWS_AT_ONCE, block=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    _sum_partials(partial, dweight)
    return dx


def add_column_sums(x: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum over the rows of x (contiguous [rows, width]) to out (fp32[width])."""
    rows, width = x.shape
    partial = x.new_empty(128, width, dtype=torch.float32)
    grid = (len(partial), triton.cdiv(width, 128))
    _partial_column_sums[grid](x, partial, rows, width, at_once=32, block=128, num_warps=4)
    _sum_partials(partial, out)


def _sum_partials(partial: torch.Tensor, out: torch.Tensor) -> None:
    rows, width = partial.shape
    _add_column_sums[(triton.cdiv(width, 32),)](partial, out, rows, width, at_once=64, block=32, num_warps=4)


@triton.jit
def _find_largest(x, largest, size, block: tl.constexpr):  # noqa: ANN001, ANN202
    found = tl.zeros((block,), tl.float32)
    for first in range(tl.program_id(0) * block, size, tl.num_programs(0) * block):
        at = first + tl.arange(0, block)
        found = tl.maximum(found, tl.abs(tl.load(x + at, at < size, 0.0).to(tl.float32)))
    tl.atomic_max(largest, tl.max(found, 0))


@triton.jit
def _round_to_fp8(x, largest, values, scale, size, top, smallest, block: tl.constexpr):  # noqa: ANN001, ANN202
    found = tl.maximum(tl.load(largest), smallest)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    rounded = tl.load(x + at, at < size, 0.0).to(tl.float32) * tl.div_rn(top, found)
    tl.store(values + at, rounded.to(values.dtype.element_ty), at < size)
    if tl.program_id(0) == 0:
        tl.store(scale, tl.div_rn(found, top))


def round_to_fp8(x: torch.Tensor, top: float, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """training.fast.fp8.round_to_fp8 on a GPU: values (float8_e4m3fn, as x) and scale (fp32 scalar).

    The first pass finds the largest magnitude; much of x is still in the L2 cache for the second.
    """
    x = x.contiguous()
    largest, scale = torch.zeros((), device=x.device), torch.empty((), device=x.device)
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    _find_largest[(_PROGRAMS,)](x, largest, x.numel(), block=8192, num_warps=8)
    _round_to_fp8[(triton.cdiv(x.numel(), 8192),)](
        x, largest, values, scale, x.numel(), top, smallest, block=8192, num_warps=8
    )
    return values, scale
