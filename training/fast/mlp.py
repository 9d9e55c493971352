"""SwiGLU in the epilogue of the matrix products of an MLP block, by QuACK's kernels for Hopper GPUs (optional).

SwiGLU as a kernel of its own reads and writes the widest activations of a layer once more in each direction. In the
products' epilogues it costs no memory traffic of its own, and what it computes is computed again in the
backward pass instead of being kept. QuACK: https://github.com/Dao-AILab/quack.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import torch

from training.fast.fp8 import Rounded, round_to_fp8
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
# tile, cluster, two tiles in turns, sums kept in the matrix units: the fastest for FP8 of seven at 32,768 x 896 x 9,728
_FP8 = ((128, 192), (1, 2, 1), True, True)


class SwiGLU(torch.autograd.Function):
    """(silu(x @ gate^T) * (x @ up^T)) @ down^T: [tokens, hidden] -> [tokens, hidden], all bf16 on a GPU.

    gate_up: [2 * ffn, hidden], the gate's rows first, as Megatron keeps them; down: [hidden, ffn]. The gradients of
    both are added to their `main_grad` (fp32), and autograd gets empty tensors. With `fp8` the products with gate and
    up have FP8 operands (training/fast/fp8.py).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, fp8: bool) -> torch.Tensor:
        from quack.gemm_interface import gemm_gated

        if fp8:
            interleaved, activated = _multiply_gated(round_to_fp8(x), round_to_fp8(gate_up))
        else:
            interleaved, activated = gemm_gated(x, gate_up.t(), activation="swiglu", concat_layout=("B",), tuned=False)
        ctx.save_for_backward(x, gate_up, down, interleaved)
        out: torch.Tensor = activated @ down.t()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
        return dx, _added(gate_up), _added(down), None


def _multiply_gated(x: Rounded, gate_up: Rounded) -> tuple[torch.Tensor, torch.Tensor]:
    """QuACK's `gemm_gated` for FP8 operands, whose scales its own interface does not take.

    Returns:
        x @ gate^T and x @ up^T, their columns alternating: bf16 [tokens, 2 * ffn]; silu(gate) * up: bf16 [tokens, ffn].
    """
    from quack.cute_dsl_utils import get_max_active_clusters
    from quack.gemm_act import GemmGatedSm90
    from quack.gemm_tvm_ffi_utils import make_scheduler_args, make_varlen_args

    tokens, width = len(x.values), len(gate_up.values)
    interleaved = x.values.new_empty(tokens, width, dtype=torch.bfloat16)
    activated = x.values.new_empty(tokens, width // 2, dtype=torch.bfloat16)
    scale = x.scale * gate_up.scale
    tile, cluster, pingpong, fast_sums = _FP8
    _compile_gated(tile, cluster, pingpong, fast_sums)(
        *map(_as_batch, (x.values, gate_up.values, interleaved)),
        None,
        GemmGatedSm90.EpilogueArguments(_as_batch(activated), None, alpha=scale.data_ptr(), rounding_mode=None),
        make_scheduler_args(get_max_active_clusters(cluster[0] * cluster[1]), 8, None),
        make_varlen_args(None, None, None),
    )
    return interleaved, activated


def _as_batch(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, width] -> [rows, width, 1], as QuACK's kernels expect a batch of one."""
    return matrix.unsqueeze(0).permute(1, 2, 0)


@functools.lru_cache
def _compile_gated(tile: tuple[int, int], cluster: tuple[int, int, int], pingpong: bool, fast_sums: bool) -> Any:
    """Compile the kernel, or read it from QuACK's cache directory, for any number of tokens and any width."""
    from quack.cache import jit_cache

    source = hashlib.sha256(inspect.getsource(_build_gated).encode()).hexdigest()  # QuACK knows its own files only
    return jit_cache(_build_gated)(tile, cluster, pingpong, fast_sums, source)


def _build_gated(
    tile: tuple[int, int], cluster: tuple[int, int, int], pingpong: bool, fast_sums: bool, source: str
) -> Any:
    """Compile the kernel; `source` only tells a kernel in QuACK's cache from one that an older function built."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr
    from quack import gemm_tvm_ffi_utils as quack
    from quack.activation import gate_fn_map
    from quack.compile_utils import make_fake_tensor
    from quack.gemm_act import GemmGatedSm90

    fp8, bf16 = cutlass.Float8E4M3FN, cutlass.BFloat16
    a, b, d, c, rows, _, _, batch = quack.make_fake_gemm_tensors(fp8, fp8, bf16, None, "k", "k", "n", None)
    activated = make_fake_tensor(
        bf16, (rows, cute.sym_int(), batch), leading_dim=1, divisibility=quack.div_for_dtype(bf16)
    )
    alpha = make_ptr(cutlass.Float32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return quack.compile_gemm_kernel(
        functools.partial(GemmGatedSm90, fp8_fast_accum=fast_sums),
        *(fp8, tile, cluster, pingpong, True, False, False, (9, 0), a, b, d, c),
        GemmGatedSm90.EpilogueArguments(activated, gate_fn_map["swiglu"], alpha=alpha),
        quack.make_fake_scheduler_args(False, False, batch),
        quack.make_fake_varlen_args(False, False, False, None),
        concat_layout=("B",),
    )


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


def bind(model: Any, fp8: bool) -> None:
    """Replace the forward of each MLP of a built GPTModel whose layers training/fast/layers.py has bound.

    Args:
        fp8: while training, the products with gate and up have FP8 operands.
    """
    for layer in model.decoder.layers:
        layer.mlp.forward = _forward(layer.mlp, fp8)


def _forward(mlp: Any, fp8: bool) -> Any:
    def forward(normed: torch.Tensor) -> tuple[torch.Tensor, None]:
        """MLP.forward: [seq, batch, hidden] -> [seq, batch, hidden]."""
        rows = normed.reshape(-1, normed.shape[-1])
        weights = mlp.linear_fc1.weight, mlp.linear_fc2.weight
        out: torch.Tensor = SwiGLU.apply(rows, *weights, fp8 and torch.is_grad_enabled())  # type: ignore[no-untyped-call]
        return out.view(normed.shape), None

    return forward
