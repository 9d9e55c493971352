"""Matrix products of the forward pass with both operands rounded to FP8 (`speed.fp8`, `speed.fp8_lm_head`).

An operand is kept as x / scale in e4m3 (4 bits of exponent, 3 of mantissa), with one scale per tensor, so that its
largest number becomes 448, the largest of the format (per-tensor current scaling: arXiv 2209.05433). Products are
summed in the matrix units, with fewer bits than fp32 (docs/measurements/speed-levers.md), and multiplied by both
scales. Nothing is carried from step to step, so checkpoints do not change.

Only inputs that a norm has just written are rounded: they are the narrow ones (896 wide at 0.5B), where a pass over the
memory costs less than the product gains. The weights are rounded again in each micro batch. All gradients are computed
in bf16, from the operands that were not rounded, and validation uses bf16 throughout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = 1e-12  # of the largest number of a tensor, so that a tensor of zeros has a scale


@dataclasses.dataclass(frozen=True)
class Rounded:
    """values (float8_e4m3fn, contiguous [rows, width]) * scale (fp32 scalar on the same device) is the tensor."""

    values: torch.Tensor
    scale: torch.Tensor


def round_to_fp8(x: torch.Tensor) -> Rounded:
    """Round a contiguous bf16 or fp32 tensor, by the largest of its magnitudes."""
    if x.is_cuda:
        from training.fast import kernels

        return Rounded(*kernels.round_to_fp8(x, LARGEST, _SMALLEST))
    largest = x.detach().abs().amax().float().clamp(min=_SMALLEST)
    top = torch.full_like(largest, LARGEST)  # `LARGEST / largest` would round twice: torch multiplies by 1 / largest
    return Rounded((x.detach().float() * (top / largest)).to(torch.float8_e4m3fn), largest / top)


def multiply(x: Rounded, weight: Rounded, dtype: torch.dtype) -> torch.Tensor:
    """x @ weight^T: [rows, in], [out, in] -> `dtype` [rows, out]. On a GPU both sizes are multiples of 16."""
    if x.values.is_cuda:
        return torch._scaled_mm(
            x.values, weight.values.t(), x.scale, weight.scale, out_dtype=dtype, use_fast_accum=True
        )
    return (x.values.float() @ weight.values.float().t() * (x.scale * weight.scale)).to(dtype)


def find_problem(config: Any, width: int) -> str | None:
    """Why a GPU or a model of this Megatron configuration cannot use FP8 products, or None. A CPU emulates them.

    Args:
        width: of the product's output.
    """
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() < (8, 9):
            return "it needs a GPU with FP8 matrix units (Ada, Hopper or newer)"
        if not config.bf16:
            return "it needs bf16"
    sizes = config.hidden_size, width
    return f"its sizes must be multiples of 16, found {sizes[0]} x {sizes[1]}" if any(n % 16 for n in sizes) else None
