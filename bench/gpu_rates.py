"""Measure what the GPU can do: a large bf16 matrix product on random data, and a large copy."""

from __future__ import annotations

from collections.abc import Callable

import torch


def measure_matmul_tflops(size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a bf16 [size, size] matrix product on random data, the median of `repeats`."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / _median_seconds(lambda: a @ b, repeats) / 1e12


def measure_copy_tbps(gib: float = 4.0, repeats: int = 20) -> float:
    """TB/s (1e12) of a device-to-device copy, bytes read plus bytes written, the median of `repeats`."""
    a = torch.randint(0, 255, (int(gib * 2**30),), device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * a.numel() / _median_seconds(lambda: b.copy_(a), repeats) / 1e12


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[3:])[repeats // 2]
