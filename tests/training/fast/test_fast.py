"""Every speed lever takes effect, and computes what the path without it computes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import GateError
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo

STEPS = int(os.environ.get("STEPS", "20"))  # 50 is the long exercise of docs/measurements/same-training.md
SEQ = 64
RUN: tuple[str, ...] = (*SHORT, f"trainer.max_steps={STEPS}", "data.micro_batch_size=2", f"data.seq_length={SEQ}")
RUN += (f"model.config.seq_length={SEQ}",)


def _counted(sample: Path, spied: str, *words: str) -> tuple[list[dict[str, Any]], int]:
    """The rows of a run, and how often the function `module:Class.name` was called in it (inside a fork)."""
    import importlib

    module, path = spied.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for step in owners:
        owner = getattr(owner, step)
    original, calls = getattr(owner, name), [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    setattr(owner, name, counting)
    return train(sample, *words), calls[0]


# lever -> the function that must be called, and how often per step at least (4 layers, 2 micro batches)
LEVERS = {
    "speed.sync_free_loss=True": ("training.fast.loss:SyncFreeLossReduction.reduce", 1),
    "speed.fused_lm_head=True": ("training.fast.lm_head:linear_cross_entropy", 2),
    "speed.fused_qkv=True": ("training.fast.qkv:_rotate", 2 * 4 * 4),
    "speed.fused_norm=True": ("training.fast.layers:AddNorm.forward", 2 * (2 * 4 + 1)),
    "speed.fused_embedding=True model.config.gradient_accumulation_fusion=True": (
        "training.fast.embedding:Embed.forward",
        2,
    ),
    "speed.device_step=True": ("training.fast.optimizer:DeviceStep.__call__", 1),
    "model.config.bias_activation_fusion=True": ("megatron.core.transformer.mlp:bias_swiglu_impl", 2 * 4),
    "model.config.bias_dropout_fusion=True": (
        "megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train",
        2 * 4 * 2,
    ),
    "model.config.gradient_accumulation_fusion=True": ("training.fast.wgrad:accumulate", 2 * 4 * 4),
}


@pytest.mark.parametrize("lever", LEVERS)
def test_each_lever_trains_as_the_plain_path_does(
    lever: str, sample: Path, forked: Callable[..., Any], plain: list[float]
) -> None:
    """fp32 on the CPU, same seed: the losses agree to 2e-5 (another order of sums, grown over the run)."""
    spied, least = LEVERS[lever]
    rows, calls = forked(_counted, sample, spied, *RUN, *lever.split())
    assert calls >= least * STEPS
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(plain, abs=2e-5)


@pytest.fixture(scope="module")
def plain(nemo: None, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    from tests.conftest import call_in_fork

    rows = call_in_fork(train, sample, *RUN, cwd=tmp_path_factory.mktemp("plain"))
    return [row["loss"] for row in rows if "loss" in row]


def _logged(sample: Path, late: bool) -> tuple[list[dict[str, Any]], dict[str, list[tuple[int, float]]]]:
    """metrics.jsonl and TensorBoard's (step, value) of each name, of a short run that logs every second step.

    Args:
        late: no number is ever ready when it is asked for.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from training.async_read import AsyncRead

    if late:
        AsyncRead.ready = property(lambda self: False)  # type: ignore[assignment]
    words = ("trainer.max_steps=7", "trainer.log_every_n_steps=2", "trainer.val_check_interval=4")
    rows = train(sample, *words, "data.micro_batch_size=2", f"speed.sync_free_log={late}", "speed.device_step=True")
    events = EventAccumulator(str(Path("runs/run/tb")))
    events.Reload()
    return rows, {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_numbers_read_a_step_late_are_the_same(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    """No line is lost and none has another step's numbers, in metrics.jsonl and in TensorBoard."""
    found = []
    for late in (False, True):
        (tmp_path / str(late)).mkdir()
        found.append(forked(_logged, sample, late, cwd=tmp_path / str(late)))
    (rows, curves), (late_rows, late_curves) = found
    trained = [[row for row in some if "loss" in row] for some in (rows, late_rows)]
    assert [row["step"] for row in trained[0]] == [2, 4, 6, 7]
    varying = {"time", "step_seconds", "tokens_per_second", "memory_gib"}
    for row, late_row in zip(*trained, strict=True):
        assert row.keys() == late_row.keys()
        assert all(row[key] == late_row[key] for key in row.keys() - varying)
    assert late_curves["reduced_train_loss"] == curves["reduced_train_loss"]
    for name, curve in late_curves.items():
        assert curve == curves[name], name


@pytest.mark.parametrize("module", ["triton.runtime.cache", "triton.compiler.compiler"])
def test_triton_hashes_its_files_in_a_thread(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`triton_key` is where Triton 3.5 has it, or where it was before."""
    import sys
    import threading
    import types

    from training.speed import hash_triton

    called: list[str] = []
    for name in ("triton", "triton.runtime", "triton.runtime.cache", "triton.compiler", "triton.compiler.compiler"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[module].triton_key = lambda: called.append(threading.current_thread().name)  # type: ignore[attr-defined]
    hash_triton()
    for thread in threading.enumerate():
        if thread.name == "hash_triton":
            thread.join()
    assert called == ["hash_triton"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_the_fused_mlp_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """QuACK is installed, which asks for no GPU."""
    import sys
    import types

    from training.fast import mlp

    monkeypatch.setattr(mlp, "is_installed", lambda: True)
    for name in ("quack", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert mlp.find_problem(types.SimpleNamespace()) == "it needs a Hopper GPU (H100, H200)"


def test_all_ranks_stop_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delayed request stops every rank one step later; in the last step it is read without delay."""
    from training.interrupt import StopOnInterrupt

    other_rank = 0
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda requests, group: requests.add_(other_rank))
    stop = StopOnInterrupt()
    assert not stop._any_rank_requests_stop(delayed=True)
    other_rank = 1
    assert not stop._any_rank_requests_stop(delayed=True)
    assert stop._any_rank_requests_stop(delayed=True)
    assert StopOnInterrupt()._any_rank_requests_stop(delayed=False)


def _replayed(sample: Path, *words: str) -> tuple[list[dict[str, Any]], int]:
    """A run through the graph's schedule, with a capture that computes its micro batch again at each replay."""
    from training.fast import graph

    replays = [0]

    class ComputedAgain:
        def __init__(self, compute: Callable[[], Any]) -> None:
            self.compute = compute

        def replay(self, is_last: bool) -> Any:
            replays[0] += 1
            return self.compute()

    graph.GraphedSchedule.find_problem = staticmethod(lambda *_: None)  # type: ignore[assignment]
    graph.GraphedSchedule._capture = lambda self, compute, model: ComputedAgain(compute)  # type: ignore[assignment, return-value]
    return train(sample, *words, "speed.cuda_graph=True"), replays[0]


def test_the_graphs_schedule_trains_as_megatrons_does(
    sample: Path, forked: Callable[..., Any], plain: list[float]
) -> None:
    """The same batches, gradients over micro batches and losses (tests/gpu has the real graph)."""
    rows, replays = forked(_replayed, sample, *RUN)
    assert replays == 2 * STEPS
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(plain, abs=2e-5)
    assert rows[-1]["unmasked_tokens"] == STEPS * 4 * SEQ


def _poisoned(sample: Path) -> str:
    """A run whose third step has an infinite gradient; returns what ends it."""
    from training.fast import optimizer

    steps, norm = [0], optimizer.DeviceStep._norm

    def poisoned(self: Any) -> torch.Tensor:
        steps[0] += 1
        return norm(self) * (math.inf if steps[0] == 3 else 1.0)

    optimizer.DeviceStep._norm = poisoned
    try:
        train(sample, "trainer.log_every_n_steps=5", "trainer.max_steps=20", "speed.device_step=True")
    except GateError as problem:
        return problem.explain()
    return "nothing"


def test_a_gradient_that_is_not_finite_ends_the_run(sample: Path, forked: Callable[..., Any]) -> None:
    assert "NaN or infinity in 1 step(s) up to step 5" in forked(_poisoned, sample)


# torch's threads do not survive a fork: what computes runs in a fork itself, so that later tests can fork this process
@pytest.mark.parametrize("tied", [True, False])
def test_output_layer_and_loss_have_the_gradients_of_the_plain_functions(
    tied: bool, forked: Callable[..., Any]
) -> None:
    forked(_output_layer_and_loss, tied)


def _output_layer_and_loss(tied: bool) -> None:
    """Against float64 autograd, with uneven token weights as a mask gives them, twice into the same buffer."""
    from training.fast.lm_head import linear_cross_entropy

    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(97, 16, requires_grad=True)
    labels, weights = torch.randint(97, (40,)), torch.rand(40) * torch.randint(2, (40,))
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = torch.nn.functional.cross_entropy(exact_hidden @ exact_weight.t(), labels, reduction="none")
    (exact * weights).sum().backward()
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(97, 16), False  # type: ignore[attr-defined]
    for _ in range(2):
        losses = linear_cross_entropy(hidden, weight, labels, into_main_grad=True, tied=tied)
        (losses * weights).sum().backward()
    assert torch.allclose(losses.double(), exact, atol=1e-5)
    assert hidden.grad is not None and exact_hidden.grad is not None and exact_weight.grad is not None
    assert torch.allclose(hidden.grad.double(), 2 * exact_hidden.grad, atol=1e-5)
    assert torch.allclose(weight.main_grad.double(), 2 * exact_weight.grad, atol=1e-5)  # type: ignore[attr-defined]
    # tied: DDP's hook must still add the embedding's part
    assert weight.grad_added_to_main_grad != tied  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.allclose(linear_cross_entropy(hidden, weight, labels), losses, atol=1e-5)


def test_the_number_of_tokens_does_not_shift_the_gradients_in_bf16(forked: Callable[..., Any]) -> None:
    forked(_gradients_of_a_mean)


def _gradients_of_a_mean() -> None:
    """1/365 rounds to bf16 with an error of 0.25%: a common factor of all gradients, against those of the sum."""
    from training.fast.lm_head import linear_cross_entropy

    torch.manual_seed(0)
    labels, found = torch.randint(97, (365,)), []
    hidden, weight = torch.randn(365, 64).bfloat16(), torch.randn(97, 64).bfloat16()
    for count in (1, 365):
        x, w = (one.clone().requires_grad_() for one in (hidden, weight))
        (linear_cross_entropy(x, w, labels).sum() / count).backward()
        assert x.grad is not None and w.grad is not None
        found.append((x.grad.double() * count, w.grad.double() * count))
    for of_sum, of_mean in zip(*found, strict=True):  # the errors of single elements cancel each other
        assert float((of_mean * of_sum).sum() / (of_sum * of_sum).sum()) == pytest.approx(1.0, abs=5e-4)


def test_split_and_rotate_has_the_gradient_of_its_definition(forked: Callable[..., Any]) -> None:
    forked(_split_and_rotate)


def _split_and_rotate() -> None:
    """`torch.autograd.gradcheck` in float64 on an odd shape: 3 groups of 2 heads."""
    from training.fast.qkv import SplitAndRotate

    angles = torch.rand(5, 4, dtype=torch.float64)
    mixed = torch.randn(5, 2, 3, 4 * 8, dtype=torch.float64, requires_grad=True)
    q, k, v = SplitAndRotate.apply(mixed, angles.cos(), angles.sin(), 6)  # type: ignore[no-untyped-call]
    assert (q.shape, k.shape, v.shape) == ((5, 2, 6, 8), (5, 2, 3, 8), (5, 2, 3, 8))
    grads = [torch.randn_like(x) for x in (q, k, v)]
    torch.autograd.backward([q, k, v], grads)
    numeric = torch.zeros_like(mixed)
    with torch.no_grad():
        for index in range(0, mixed.numel(), 37):
            step = torch.zeros(mixed.numel(), dtype=torch.float64)
            step[index] = 1e-3
            there, back = (
                SplitAndRotate.apply(  # type: ignore[no-untyped-call]
                    mixed + sign * step.view_as(mixed), angles.cos(), angles.sin(), 6
                )
                for sign in (1, -1)
            )
            slope = sum(((a - b) * g).sum() for a, b, g in zip(there, back, grads, strict=True)) / 2e-3
            numeric.view(-1)[index] = slope
            assert mixed.grad is not None
            assert mixed.grad.view(-1)[index].item() == pytest.approx(slope.item(), abs=2e-4)
