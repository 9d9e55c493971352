"""FP8 operands: how they are rounded, what the training with them computes, and where it stays in full precision."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import GateError
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def test_rounding_keeps_the_largest_number_and_four_bits_of_the_others() -> None:
    from training.fast.fp8 import round_to_fp8

    x = torch.randn(300, 64) * torch.tensor([1e-6, 1.0, 50.0]).repeat(100)[:, None]
    rounded = round_to_fp8(x)
    back = rounded.values.float() * rounded.scale
    assert back.abs().max() == pytest.approx(float(x.abs().max()), rel=1e-6)
    normal = x.abs() >= rounded.scale * 2**-6  # smaller ones have an absolute error
    assert ((back - x).abs() <= x.abs() * 2**-4 * 1.0001)[normal].all()
    assert ((back - x).abs() <= rounded.scale * 2**-10 * 1.0001)[~normal].all()
    assert not round_to_fp8(torch.zeros(4, 16)).values.float().any()
    assert round_to_fp8(torch.tensor([[1.0, float("nan")]])).values.isnan().any()


def test_the_product_of_rounded_operands_is_scaled_back() -> None:
    """Error of a product of 2,048 random numbers: each operand has 2.6% (rms) of its own, and they are independent."""
    from training.fast.fp8 import multiply, round_to_fp8

    x, weight = 30 * torch.randn(64, 2048), 0.02 * torch.randn(32, 2048)
    exact = x.double() @ weight.double().t()
    error = (multiply(round_to_fp8(x), round_to_fp8(weight), torch.float32).double() - exact).norm() / exact.norm()
    assert 0.02 < error < 0.05


def test_the_output_layer_rounds_in_training_only(forked: Callable[..., Any]) -> None:
    forked(_output_layer)


def _output_layer() -> None:
    """The gradients are those of the operands before rounding, at the logits after it."""
    from training.fast.fp8 import multiply, round_to_fp8
    from training.fast.lm_head import linear_cross_entropy

    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 128).bfloat16().requires_grad_(), torch.randn(97, 128).bfloat16().requires_grad_()
    labels = torch.randint(97, (64,))
    losses = linear_cross_entropy(hidden, weight, labels, fp8=True)
    losses.sum().backward()
    logits = multiply(round_to_fp8(hidden), round_to_fp8(weight), torch.bfloat16).double()
    assert torch.allclose(losses.double(), torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    dlogits = torch.softmax(logits, -1) - torch.nn.functional.one_hot(labels, 97)
    assert hidden.grad is not None and weight.grad is not None
    for found, exact in ((hidden.grad, dlogits @ weight.double()), (weight.grad, dlogits.t() @ hidden.double())):
        assert (found.double() - exact).norm() / exact.norm() < 0.01
    with torch.no_grad():
        in_bf16 = linear_cross_entropy(hidden, weight, labels, fp8=True)
        assert torch.equal(in_bf16, linear_cross_entropy(hidden, weight, labels))
    assert not torch.equal(in_bf16, losses)


def test_training_with_fp8_stays_close(sample: Path, forked: Callable[..., Any]) -> None:
    """40 steps of qwen25_tiny: not the same numbers, and within 0.02 nats of them; validation is not rounded."""
    short = ("data.seq_length=64", "model.config.seq_length=64")
    words = (*SHORT, *short, "trainer.max_steps=40", "trainer.val_check_interval=40", "speed.fused_lm_head=True")
    plain = forked(train, sample, *words, name="plain")
    rounded = forked(train, sample, *words, "speed.fp8_lm_head=True", name="rounded")
    assert plain[0]["validation"] == rounded[0]["validation"]
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (plain, rounded)]
    differences = [abs(a - b) for a, b in zip(*losses, strict=True)]
    assert len(differences) == 40
    assert 0 < max(differences) < 0.02


@pytest.mark.parametrize(("hidden", "width"), [(896, 151_937), (904, 4_096)])
def test_sizes_that_the_matrix_units_do_not_take(hidden: int, width: int) -> None:
    from training.fast.fp8 import find_problem

    config = types.SimpleNamespace(hidden_size=hidden, bf16=True)
    problem = find_problem(config, width)
    assert problem is not None and f"{hidden} x {width}" in problem
    assert find_problem(types.SimpleNamespace(hidden_size=896, bf16=True), 151_936) is None


def _refused(sample: Path, name: str, *words: str) -> str:
    with pytest.raises(GateError) as caught:
        train(sample, *SHORT, "trainer.max_steps=1", *words, name=name)
    return f"{caught.value.what}: {caught.value.found}"


def _bind(*levers: str) -> str:
    """What the levers' callback says where the preflight has not looked, as on another machine."""
    from training.speed import Speed

    model = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=896, ffn_hidden_size=4_864, bf16=True))
    with pytest.raises(GateError) as caught:
        Speed(fp8=True, **dict.fromkeys(levers, True))._bind_layers(model, None)
    return f"{caught.value.what}: {caught.value.found}"


def test_fp8_that_cannot_be_used_ends_the_run(sample: Path, forked: Callable[..., Any]) -> None:
    """It trains differently, so it is not switched off in silence as a lever is."""
    found = forked(_refused, sample, "head", "speed.fp8_lm_head=True")
    assert found == "speed.fp8_lm_head cannot be used: speed.fused_lm_head is off"
    assert "speed.fused_norm is off; speed.fused_mlp is off; QuACK is not installed: pip install" in forked(_bind)
    found = forked(_bind, "fused_norm", "fused_mlp")
    assert found.startswith("speed.fp8 cannot be used: QuACK is not installed")
