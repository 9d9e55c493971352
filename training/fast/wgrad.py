"""Adds weight gradients to Megatron's fp32 buffer inside the matrix product, without Apex.

Megatron's own linear layers call the Apex extension `fused_weight_gradient_mlp_cuda` for this and refuse
`gradient_accumulation_fusion` without it. cuBLAS does the same through torch: bf16 operands, fp32 output, beta = 1.
"""

from __future__ import annotations

import types

import torch


def is_available() -> bool:
    """Whether torch can multiply bf16 matrices into an fp32 one (2.8 and newer)."""
    return hasattr(torch.ops.aten.addmm, "dtype_out")


def accumulate(inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight's gradient: main_grad += grad_output^T @ inputs.

    Args:
        inputs: bf16 or fp32 [tokens, in].
        grad_output: the same dtype, [tokens, out].
        main_grad: fp32[out, in].
    """
    if inputs.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), inputs)
    elif inputs.is_cuda and is_available():
        torch.ops.aten.addmm.dtype_out(main_grad, grad_output.t(), inputs, torch.float32, out=main_grad)
    else:
        main_grad.add_(grad_output.t() @ inputs)


def replace_apex() -> None:
    """Give Megatron's linear layers `accumulate` if Apex is not installed.

    Replaces `megatron.core.tensor_parallel.layers.fused_weight_gradient_mlp_cuda` (0.12 and 0.13).
    """
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
            wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
        )
        layers._grad_accum_fusion_available = True
