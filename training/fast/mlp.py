"""SwiGLU in the epilogue of the matrix products of an MLP block, by QuACK's kernels for Hopper GPUs (optional).

SwiGLU as a kernel of its own reads and writes the widest activations of a layer once more in each direction. In the
products' epilogues it costs no memory traffic of its own, and what it computes is computed again in the
backward pass instead of being kept. QuACK: https://github.com/Dao-AILab/quack.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch

from training.fast.layers import _added
from training.fast.wgrad import accumulate

_INSTALL = "pip install 'quack-kernels==0.6.0'"  # its functions and what compiles them change between versions
_BACKWARD = {  # of the configurations in QuACK's list, the fastest at 16,384 x 896 x 4,864 on an H100
    "tile_m": 128,
    "tile_n": 128,
    "cluster_m": 1,
    "cluster_n": 2,
    "pingpong": True,
    "is_dynamic_persistent": False,
}


class SwiGLU(torch.autograd.Function):
    """(silu(x @ gate^T) * (x @ up^T)) @ down^T: [tokens, hidden] -> [tokens, hidden], all bf16 on a GPU.

    gate_up: [2 * ffn, hidden], the gate's rows first, as Megatron keeps them; down: [hidden, ffn]. The gradients of
    both are added to their `main_grad` (fp32), and autograd gets empty tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        from quack.gemm_interface import gemm_gated

        interleaved, activated = gemm_gated(x, gate_up.t(), activation="swiglu", concat_layout=("B",), tuned=False)
        ctx.save_for_backward(x, gate_up, down, interleaved)
        out: torch.Tensor = activated @ down.t()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm, gemm_add_inplace, gemm_dgated_tuned

        x, gate_up, down, interleaved = ctx.saved_tensors
        grad = grad.contiguous()
        dinterleaved, activated = torch.empty_like(interleaved), grad.new_empty(len(grad), down.shape[1])
        gemm_dgated_tuned.fn(
            *(grad, down, interleaved, dinterleaved, activated),
            activation="swiglu",
            dynamic_scheduler=True,
            config=GemmConfig(**_BACKWARD),
        )
        accumulate(activated, grad, down.main_grad)
        dx = gemm(dinterleaved, gate_up, concat_layout=("B",), dynamic_scheduler=True, tuned=False)
        gemm_add_inplace(
            dinterleaved.t(), x, gate_up.main_grad, concat_layout=("C", "out"), dynamic_scheduler=True, tuned=False
        )
        return dx, _added(gate_up), _added(down)


def is_installed() -> bool:
    """Whether QuACK can be imported."""
    return importlib.util.find_spec("quack") is not None


def find_problem(config: Any) -> str | None:
    """Why the MLP blocks of a model of this Megatron configuration cannot be replaced, or None."""
    if not is_installed():
        return f"QuACK is not installed: {_INSTALL}"
    if os.access(Path.home(), os.W_OK):  # its default is below /tmp, where another user may have put kernels
        os.environ.setdefault("QUACK_CACHE_DIR", str(Path.home() / ".cache" / "quack"))
    try:
        import quack.gemm_interface  # noqa: F401
    except Exception as error:  # whatever its compiler's version makes of it
        return f"QuACK cannot be imported ({error}): {_INSTALL}"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "it needs a Hopper GPU (H100, H200)"
    if not config.gradient_accumulation_fusion or not config.bf16:
        return "it needs bf16 and model.config.gradient_accumulation_fusion=True"
    if not config.gated_linear_unit or config.activation_func is not torch.nn.functional.silu:
        return "the MLP is not a SwiGLU"
    return None


def bind(model: Any) -> None:
    """Replace the forward of each MLP of a built GPTModel whose layers training/fast/layers.py has bound."""
    for layer in model.decoder.layers:
        layer.mlp.forward = _forward(layer.mlp)


def _forward(mlp: Any) -> Any:
    def forward(normed: torch.Tensor) -> tuple[torch.Tensor, None]:
        """MLP.forward: [seq, batch, hidden] -> [seq, batch, hidden]."""
        rows = normed.reshape(-1, normed.shape[-1])
        out: torch.Tensor = SwiGLU.apply(rows, mlp.linear_fc1.weight, mlp.linear_fc2.weight)  # type: ignore[no-untyped-call]
        return out.view(normed.shape), None

    return forward
