"""Where a captured micro batch is cut, and what replicas exchange between its pieces (tests/gpu: with real graphs)."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


class Group:
    """A bucket group of Megatron that records what is asked of it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events, self.param_gather_dispatched = name, events, False

    def start_param_sync(self) -> None:
        self.param_gather_dispatched = True
        self.events.append(f"gather {self.name}")

    def finish_param_sync(self, skip_next_bucket_dispatch: bool) -> None:
        assert skip_next_bucket_dispatch
        self.events.append(f"gathered {self.name}")

    def start_grad_sync(self) -> None:
        self.events.append(f"sum {self.name}")

    def reset(self) -> None:
        self.events.append(f"reset {self.name}")


class Model(torch.nn.Module):
    """An embedding, three layers of two weights, a last norm, and an output layer that is not called as a module."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(4, 4)
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.decoder.final_layernorm = torch.nn.LayerNorm(4)
        self.output_layer = torch.nn.Linear(4, 4)
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("compute embedding")
        x = self.embedding(x)
        for number, layer in enumerate(self.decoder.layers):
            x = layer(x)
            self.events.append(f"compute layer {number}")
        x = self.decoder.final_layernorm(x)
        self.events.append("compute output")
        return x @ self.output_layer.weight.t() + self.output_layer.bias


def _recorded(gathers: bool, sums: bool) -> tuple[Any, list[str], list[Group]]:
    """A recording of Model's forward and backward pass, whose buckets are: layers 2 and 1 with the end; the rest."""
    from training.fast.graph import PieceRecorder

    events: list[str] = []
    model = Model(events)
    groups = [Group("end", events), Group("layer 0", events), Group("embedding", events)]
    owner = {"embedding": groups[2], "decoder.layers.0": groups[1]}
    group_of = {p: owner.get(name.rpartition(".")[0], groups[0]) for name, p in model.named_parameters()}
    ddp = types.SimpleNamespace(
        module=model,
        ddp_config=types.SimpleNamespace(
            use_distributed_optimizer=True, overlap_param_gather=gathers, overlap_grad_reduce=sums
        ),
        bucket_groups=groups,
        param_to_bucket_group=group_of,
    )
    missing = {group: {p for p in group_of if group_of[p] is group} for group in groups}

    def complete(p: torch.nn.Parameter) -> None:
        group = group_of[p]
        missing[group].remove(p)
        if not missing[group] and sums:
            group.start_grad_sync()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(complete)

    class Graph:
        def __init__(self, previous: Graph | None) -> None:
            self.number: int = 0 if previous is None else previous.number + 1
            events.append(f"begin {self.number}")

        def end(self) -> None:
            events.append(f"end {self.number}")

        def replay(self) -> None:
            events.append(f"replay {self.number}")

    recorder = PieceRecorder(ddp, Graph)
    with recorder.recording():
        model(torch.ones(2, 4)).sum().backward()
    assert not any(module._forward_pre_hooks for module in model.modules())
    return recorder, events, groups


def _in_pieces() -> None:
    from training.fast.gathers import start_gathers, wait_for_gathers
    from training.fast.graph import CapturedMicroBatch

    recorder, events, groups = _recorded(gathers=True, sums=True)
    captured = [event for event in events if not event.startswith("reset")]
    assert captured == [
        *("begin 0", "compute embedding", "end 0"),  # reads the embedding
        *("begin 1", "compute layer 0", "end 1"),
        *("begin 2", "compute layer 1", "compute layer 2", "compute output", "end 2"),  # completes the end's gradients
        *("begin 3", "end 3", "begin 4", "end 4"),  # of layer 0; the embedding's are complete at the end
    ]
    assert events[-3:] == ["reset end", "reset layer 0", "reset embedding"]
    assert recorder.description() == " in 5 pieces, between which 3 buckets are exchanged"

    events.clear()
    ddp = recorder._ddp
    start_gathers(ddp)
    start_gathers(ddp)  # what is under way is not started again
    micro_batch = CapturedMicroBatch(recorder.recorded, {"loss": torch.ones(1)})
    micro_batch.replay(is_last=False)
    assert events == [
        *("gather embedding", "gather layer 0", "gather end"),
        *("gathered embedding", "replay 0", "gathered layer 0", "replay 1", "gathered end", "replay 2"),
        *("replay 3", "replay 4"),
    ]
    events.clear()
    row = micro_batch.replay(is_last=True)
    sums = [event for event in events if not event.startswith("gathered")]
    assert sums == [
        *("replay 0", "replay 1", "replay 2", "sum end", "replay 3", "sum layer 0", "replay 4"),
        "sum embedding",
    ]
    assert row["loss"] is not micro_batch.row["loss"]
    events.clear()
    for group in groups:
        group.param_gather_dispatched = False
    wait_for_gathers(ddp)
    assert events[:3] == ["gather embedding", "gather layer 0", "gather end"]
    assert sorted(events[3:]) == ["gathered embedding", "gathered end", "gathered layer 0"]


def test_replicas_exchange_between_the_pieces_of_a_micro_batch(forked: Callable[..., Any]) -> None:
    """Weights are waited for before the piece that reads them first; sums start where a bucket is complete."""
    forked(_in_pieces)


def _in_one() -> None:
    from training.fast.gathers import start_gathers, wait_for_gathers
    from training.fast.graph import CapturedMicroBatch

    recorder, events, _ = _recorded(gathers=False, sums=False)
    assert [event for event in events if not event.startswith("compute")] == ["begin 0", "end 0"]
    assert recorder.description() == ""
    events.clear()
    start_gathers(recorder._ddp)
    wait_for_gathers(recorder._ddp)
    CapturedMicroBatch(recorder.recorded, {}).replay(is_last=True)
    assert events == ["replay 0"]


def _without_sharded_weights() -> None:
    """Megatron leaves `overlap_param_gather` on where the optimizer is not distributed, and then gathers nothing."""
    from training.fast.gathers import wait_for_gathers

    events: list[str] = []
    config = types.SimpleNamespace(use_distributed_optimizer=False, overlap_param_gather=True)
    wait_for_gathers(types.SimpleNamespace(ddp_config=config, bucket_groups=[Group("all", events)]))
    assert events == []


def test_weights_that_every_replica_has_are_not_gathered(forked: Callable[..., Any]) -> None:
    forked(_without_sharded_weights)


def _validated(sample: Path) -> list[str]:
    """What a run does about its weights around each validation."""
    from training import validation as module

    validation: Any = module
    events: list[str] = []
    compute = validation.get_forward_backward_func

    def recorded() -> Any:
        events.append("forward")
        return compute()

    validation.finish_gathers = lambda model: events.append(f"gathers of {len(list(model))} chunk finished")
    validation.get_forward_backward_func = recorded
    train(sample, *SHORT, "trainer.max_steps=2", "trainer.val_check_interval=2")
    return events


def test_a_validation_waits_for_the_weights(sample: Path, forked: Callable[..., Any]) -> None:
    """Its forward pass reads weights before Megatron would wait for them: the fused norms call no module for theirs."""
    assert forked(_validated, sample) == ["gathers of 1 chunk finished", "forward"] * 2


def _interrupted() -> None:
    """An error in the micro batch is the one that is raised, and the capture ends."""
    events: list[str] = []
    model = Model(events)
    config = types.SimpleNamespace(
        use_distributed_optimizer=False, overlap_param_gather=False, overlap_grad_reduce=False
    )
    ddp = types.SimpleNamespace(module=model, ddp_config=config, bucket_groups=[])

    class Broken:
        def __init__(self, previous: Any) -> None:
            pass

        def end(self) -> None:
            events.append("ended")
            raise RuntimeError("the capture was invalidated")

    from training.fast.graph import PieceRecorder

    with pytest.raises(ValueError, match="in the model"), PieceRecorder(ddp, Broken).recording():
        raise ValueError("in the model")
    assert events == ["ended"]


def test_an_error_while_capturing_is_not_hidden(forked: Callable[..., Any]) -> None:
    forked(_interrupted)


def test_a_micro_batch_without_overlapped_exchanges_is_one_piece(forked: Callable[..., Any]) -> None:
    forked(_in_one)
