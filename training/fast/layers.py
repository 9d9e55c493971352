"""Residual addition and RMSNorm in one pass, forward and backward, across the layers of the model.

Megatron adds the residual in one kernel and normalises in the next, and the backward pass does the same in reverse with
a sum of gradients between them. Here the output of an attention or MLP block stays unadded until the norm that
reads it: that kernel writes both the sum and the normalised sum. RMSNorm: arXiv 1910.07467.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from training.fast.wgrad import accumulate

Forward = Callable[..., Any]


class AddNorm(torch.autograd.Function):
    """(residual, delta) -> (total = residual + delta, RMSNorm(total) * weight), all [seq, batch, width].

    delta is None in front of the first layer; the total is then the residual. Arithmetic in fp32; the total is rounded
    to its dtype before it is normalised, as it is when the two are kernels of their own. With `into_main_grad` the
    weight's gradient is added to `weight.main_grad` (fp32), and autograd gets an empty tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        epsilon: float,
        into_main_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = residual.shape[-1]
        rows = residual.reshape(-1, width).contiguous()
        added = None if delta is None else delta.reshape(-1, width).contiguous()
        if residual.is_cuda:
            from training.fast import kernels

            total, normed, inverses = kernels.add_norm(rows, added, weight, epsilon)
        else:
            total = rows if added is None else rows + added
            inverses = (total.float().square().mean(1) + epsilon).rsqrt()
            normed = (total.float() * inverses[:, None] * weight.float()).to(total.dtype)
        ctx.save_for_backward(total, weight, inverses)
        ctx.into_main_grad, ctx.with_delta = into_main_grad, delta is not None
        ctx.set_materialize_grads(False)
        return (residual if delta is None else total.view(residual.shape)), normed.view(residual.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        total, weight, inverses = ctx.saved_tensors
        dtotal, dnormed = (None if g is None else g.reshape(total.shape).contiguous() for g in grads)
        shape = next(g.shape for g in grads if g is not None)
        if dnormed is None:  # nothing reads what was normalised
            assert dtotal is not None
            return dtotal.view(shape), dtotal.view(shape) if ctx.with_delta else None, None, None, None
        dweight = weight.main_grad if ctx.into_main_grad else torch.zeros_like(weight, dtype=torch.float32)
        if total.is_cuda:
            from training.fast import kernels

            dx = kernels.add_norm_backward(dtotal, dnormed, total, weight, inverses, dweight)
        else:
            x, dy = total.float() * inverses[:, None], dnormed.float()
            dweight.add_((dy * x).sum(0))
            dy = dy * weight.float()
            dx32 = (dy - x * (dy * x).mean(1, keepdim=True)) * inverses[:, None]
            dx = (dx32 if dtotal is None else dx32 + dtotal.float()).to(total.dtype)
        dx = dx.view(shape)
        returned = _added(weight) if ctx.into_main_grad else dweight.to(weight.dtype)
        return dx, dx if ctx.with_delta else None, returned, None, None


class Linear(torch.autograd.Function):
    """x @ weight^T + bias: [seq, batch, in] -> [seq, batch, out], as Transformer Engine's linear layers compute it.

    The gradients of weight and bias are added to their `main_grad` (fp32), and autograd gets empty tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1]).contiguous()
        dx = (rows @ weight).view(x.shape)
        accumulate(x.reshape(-1, x.shape[-1]), rows, weight.main_grad)
        if bias is not None:
            add_column_sums(rows, bias.main_grad)
        return dx, _added(weight), None if bias is None else _added(bias)


def add_column_sums(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Add the sum over the rows of [rows, width] to out (fp32[width])."""
    if rows.is_cuda:
        from training.fast import kernels

        kernels.add_column_sums(rows, out)
    else:
        out.add_(rows.float().sum(0))


def _added(weight: torch.Tensor) -> torch.Tensor:
    """What autograd gets for a weight whose gradient is in `main_grad` already: DDP's hook ignores it."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def find_problem(config: Any) -> str | None:
    """Why the layers of a model of this Megatron configuration cannot be replaced, or None."""
    if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
        return "it supports only the plain RMSNorm"
    if config.hidden_dropout or config.recompute_granularity or config.add_bias_linear:
        return "it does not support dropout, recomputation or biases in the blocks"
    if config.fp32_residual_connection or config.cpu_offloading or config.fp8:
        return "it does not support fp32 residuals, offloading or Transformer Engine's FP8 (model.config.fp8)"
    return None


def bind(model: Any, into_main_grad: bool) -> None:
    """Replace the forward of each `megatron.core.transformer.transformer_layer.TransformerLayer` and of the last norm.

    Only for tensor and pipeline parallel size 1. Megatron-core 0.12 and 0.13.

    Args:
        model: a built `megatron.core.models.gpt.GPTModel`.
        into_main_grad: the model uses `gradient_accumulation_fusion`.
    """
    unadded = _Unadded()
    for layer in model.decoder.layers:
        before_attention = _split(layer.input_layernorm, layer.self_attention.linear_qkv, into_main_grad)
        before_mlp = _split(layer.pre_mlp_layernorm, layer.mlp.linear_fc1, into_main_grad)
        layer.forward = _layer_forward(layer, unadded, before_attention, before_mlp)
    last = model.decoder.final_layernorm
    norm = _Norm(last.weight, model.config.layernorm_epsilon, into_main_grad)
    last.forward = lambda hidden: norm(hidden, unadded.take())[1]


@dataclasses.dataclass
class _Unadded:
    """The output of the last MLP block, which is not yet in the residual stream."""

    delta: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        delta, self.delta = self.delta, None
        return delta


@dataclasses.dataclass(frozen=True)
class _Norm:
    weight: torch.Tensor
    epsilon: float
    into_main_grad: bool

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return AddNorm.apply(  # type: ignore[no-any-return, no-untyped-call]
            residual, delta, self.weight, self.epsilon, self.into_main_grad
        )


def _split(norm: Any, linear: Any, into_main_grad: bool) -> _Norm:
    """The norm in front of a linear layer, which afterwards expects a normalised input.

    Transformer Engine has both in one module, Megatron's local layers have a module of each.
    """
    epsilon = linear.config.layernorm_epsilon
    if not hasattr(linear, "layer_norm_weight"):
        return _Norm(norm.weight, epsilon, into_main_grad)
    if into_main_grad:
        linear.forward = lambda x: (Linear.apply(x, linear.weight, _bias(linear)), None)  # type: ignore[no-untyped-call]
    else:
        linear.forward = lambda x: (torch.nn.functional.linear(x, linear.weight, _bias(linear)), None)
    return _Norm(linear.layer_norm_weight, epsilon, into_main_grad)


def _bias(linear: Any) -> torch.Tensor | None:
    """Transformer Engine's linear layer without a bias has an empty tensor."""
    return linear.bias if linear.use_bias else None


def _layer_forward(layer: Any, unadded: _Unadded, before_attention: _Norm, before_mlp: _Norm) -> Forward:
    def forward(
        hidden_states: torch.Tensor, context: Any = None, context_mask: Any = None, **attention: Any
    ) -> tuple[torch.Tensor, None]:
        """TransformerLayer.forward: the residual stream [seq, batch, hidden], without this layer's MLP output."""
        delta = None if layer.layer_number == 1 else unadded.take()
        total, normed = before_attention(hidden_states, delta)
        attended, _ = layer.self_attention(normed, **attention)
        total, normed = before_mlp(total, attended)
        unadded.delta, _ = layer.mlp(normed)
        return total, None

    return forward
