"""Output layer and cross-entropy in one function, so that the logits are read and written as rarely as possible.

The logits are the largest tensor of a small model (151,936 wide). Megatron's own code reads and writes them for the
matrix product, the softmax, the loss, the gradient and its scaling. Here the loss kernel overwrites the logits with
softmax - onehot (online softmax, arXiv 1805.02867), and the gradient g of each token's loss multiplies the narrow
tensors instead: d hidden = g * (d logits @ W), d W = d logits^T @ (g * hidden).
"""

from __future__ import annotations

from typing import Any

import torch

from training.fast.fp8 import multiply, round_to_fp8
from training.fast.sizes import VALIDATION_TOKENS
from training.fast.wgrad import accumulate


def cross_entropy_(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the losses and overwrite `logits` with d(loss of the row)/d(logits).

    Args:
        logits: bf16 or fp32 [tokens, vocab], contiguous; overwritten with softmax(logits) - onehot(labels).
        labels: int64[tokens], 0 <= label < vocab.

    Returns:
        fp32[tokens]: -log softmax(logits)[label], in nats.
    """
    if logits.is_cuda:
        from training.fast import kernels

        return kernels.cross_entropy_(logits, labels)
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    rows = torch.arange(len(labels), device=labels.device)
    losses = -log_probabilities[rows, labels]
    gradient = log_probabilities.exp_()
    gradient[rows, labels] -= 1.0
    logits.copy_(gradient)
    return losses


class LinearCrossEntropy(torch.autograd.Function):
    """losses = cross_entropy(hidden @ weight^T, labels).

    hidden: [tokens, hidden]; weight: [vocab, hidden], the same dtype; labels: int64[tokens]; losses: fp32[tokens].
    With `into_main_grad` the weight's gradient is added to `weight.main_grad` (Megatron's fp32 gradient buffer) in the
    matrix product itself, and autograd gets none. With `fp8` the logits come from FP8 operands (training/fast/fp8.py).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        into_main_grad: bool,
        tied: bool,
        fp8: bool,
    ) -> torch.Tensor:
        logits = multiply(round_to_fp8(hidden), round_to_fp8(weight), hidden.dtype) if fp8 else hidden @ weight.t()
        losses = cross_entropy_(logits, labels)
        ctx.save_for_backward(hidden, weight, logits)
        ctx.into_main_grad, ctx.tied = into_main_grad, tied
        return losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, dlogits = ctx.saved_tensors
        # grad stays fp32 and each product is rounded once. Rounded to bf16 first, it would shift all gradients of the
        # micro batch by one factor, up to 0.4% off; the rounding of the products averages out but where grad is within
        # 0.5% above a power of two (0.2%). Both products convert element by element, without a copy in fp32.
        grad = grad[:, None]
        dhidden = (dlogits @ weight).mul_(grad)
        scaled = torch.mul(hidden, grad, out=torch.empty_like(hidden))
        if not ctx.into_main_grad:
            return dhidden, dlogits.t() @ scaled, None, None, None, None
        accumulate(scaled, dlogits, weight.main_grad)
        if ctx.tied:  # the embedding's gradient of the same weight comes later, and DDP's hook adds it
            return dhidden, None, None, None, None, None
        weight.grad_added_to_main_grad = True  # DDP's hook then ignores the empty tensor below
        return dhidden, torch.empty_like(weight), None, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    into_main_grad: bool = False,
    tied: bool = False,
    fp8: bool = False,
) -> torch.Tensor:
    """Apply `LinearCrossEntropy`; without gradients in chunks of tokens and never in FP8, as validation does."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        losses: torch.Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, labels, into_main_grad, tied, fp8
        )
        return losses
    # each chunk's logits are freed before the next: a CUDA graph keeps its own memory, so they come on top of it
    chunks = zip(hidden.split(VALIDATION_TOKENS), labels.split(VALIDATION_TOKENS), strict=True)
    return torch.cat([cross_entropy_(h @ weight.t(), y) for h, y in chunks])


class _DeferredLogits:
    """Returned by the output layer instead of logits: the loss does not need them, other callers compute them."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor) -> None:
        self.hidden, self.weight = hidden, weight

    def transpose(self, first: int, second: int) -> torch.Tensor:
        """Compute the logits [seq, batch, vocab], transposed: all that GPTModel does with them without labels."""
        return (self.hidden @ self.weight.t()).transpose(first, second)


def bind(model: Any, into_main_grad: bool, fp8: bool) -> None:
    """Replace `output_layer` and `compute_language_model_loss` of a built `megatron.core.models.gpt.GPTModel`.

    Only for tensor and pipeline parallel size 1, where a rank has the whole vocabulary, the embedding and the output
    layer.

    Args:
        into_main_grad: the model uses `gradient_accumulation_fusion`.
        fp8: while training, the logits come from FP8 operands.
    """
    tied = bool(model.share_embeddings_and_output_weights)

    def output_layer(
        hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[_DeferredLogits, None]:
        return _DeferredLogits(hidden, model.output_layer.weight if weight is None else weight), None

    def loss(labels: torch.Tensor, logits: _DeferredLogits) -> torch.Tensor:
        """labels: int64[batch, seq] -> fp32[batch, seq]."""
        seq, batch, width = logits.hidden.shape
        flat = labels.transpose(0, 1).reshape(-1)
        losses = linear_cross_entropy(logits.hidden.view(-1, width), logits.weight, flat, into_main_grad, tied, fp8)
        return losses.view(seq, batch).transpose(0, 1).contiguous()

    model.output_layer.forward = output_layer
    model.compute_language_model_loss = loss
