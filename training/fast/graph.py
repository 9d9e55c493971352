"""One micro batch as a CUDA graph: forward and backward are captured once, then replayed without Python.

A small model is launch-bound: a micro batch is a thousand kernels of a few microseconds each. The graph is captured
from Megatron's own `forward_step` and `backward_step`, so that it computes what Megatron's schedule computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from data.module import ReadyBatch, data_step
from training.documents import is_isolated, repeat_last_border

log = logging.getLogger("launch")


class GraphedSchedule:
    """Replaces `megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining`.

    Gradients are summed over the replicas after the last micro batch, outside the graph: a communicator that a graph
    holds cannot be destroyed before it (pytorch issue 115388).
    Upstream: megatron-core 0.14 has a graph of the whole iteration; this one does not grow with the number of micro
    batches.

    Args:
        warm_up_batches: micro batches to compute before the capture (initialisation, kernel choice, compilation). Their
            gradients are dropped, so that the graph computes every step: a resumed run repeats the kernels of an
            uninterrupted one, and no step needs more memory than the others.
    """

    def __init__(self, warm_up_batches: int = 2) -> None:
        self._warm_up_batches = warm_up_batches
        self._captured: CapturedMicroBatch | None = None
        self._batch = ReadyBatch()
        self._captured_for = 0  # micro batches per step

    @staticmethod
    def find_problem(
        config: Any, ddp_config: Any, fused_lm_head: bool, sync_free_loss: bool, fused_qkv: bool
    ) -> str | None:
        """Why this schedule cannot be used with a model of these Megatron configurations, or None."""
        if not torch.cuda.is_available():
            return "it needs a GPU"
        if config.cross_entropy_fusion_impl == "te" and not fused_lm_head:
            return (
                "Transformer Engine's cross-entropy cannot be captured: model.config.cross_entropy_fusion_impl=native"
            )
        if not sync_free_loss:
            return "NeMo's loss waits for the GPU: speed.sync_free_loss=True"
        if is_isolated(config) and not (fused_qkv or config.apply_rope_fusion):
            return "Megatron's own RoPE reads the documents' borders on the host: speed.fused_qkv=True"
        if ddp_config.overlap_grad_reduce:
            return "its gradients are summed after the backward pass: trainer.strategy.ddp.overlap_grad_reduce=False"
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        ranks *= parallel_state.get_tensor_model_parallel_world_size()
        ranks *= parallel_state.get_context_parallel_world_size()
        return None if ranks == 1 else "it needs tensor, pipeline and context parallel size 1"

    def __call__(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **unused: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Run one training step, by Megatron's schedule protocol (training/speed.py uses it for nothing else)."""
        model = model[0] if isinstance(model, list) else model
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator

        def compute() -> dict[str, torch.Tensor]:
            return _compute_micro_batch(forward_step_func, iter([self._batch]), model, num_microbatches)

        rows = []
        for _ in range(num_microbatches):
            self._copy_batch(data_step(iterator))
            if self._warm_up_batches:
                self._warm_up(compute, model)
            if self._captured is None or self._captured_for != num_microbatches:
                self._captured = None  # free its memory before the next capture
                self._captured, self._captured_for = self._capture(compute, model), num_microbatches
            rows.append(self._captured.replay())
        if finalize := get_model_config(model).finalize_model_grads_func:
            finalize([model], None)
        return rows

    def _copy_batch(self, batch: dict[str, torch.Tensor | None]) -> None:
        """Copy the batch to the tensors that the graph reads; a batch of other shapes needs another graph."""
        batch = repeat_last_border(batch, self._batch)
        if _shapes(batch) != _shapes(self._batch):
            self._batch = ReadyBatch({name: value if value is None else value.clone() for name, value in batch.items()})
            self._captured = None
            return
        for name, value in batch.items():
            if value is not None:
                self._batch[name].copy_(value)  # type: ignore[union-attr]

    def _warm_up(self, compute: Callable[[], Any], model: Any) -> None:
        """Compute the batch before the first micro batch of a step; leaves gradients and random states as before."""
        with _preserved_random_states():
            for _ in range(self._warm_up_batches):
                compute()
                get_attr_wrapped_model(model, "zero_grad_buffer")()
                torch.cuda.empty_cache()  # the freed memory is in pieces too small for the next logits
        self._warm_up_batches = 0

    def _capture(self, compute: Callable[[], dict[str, torch.Tensor]], model: Any) -> CapturedMicroBatch:
        """Capture one forward and backward, without computing it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        _move_gradient_hooks(stream, model)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        for state in get_cuda_rng_tracker().get_states().values():  # attention draws from Megatron's named streams
            if isinstance(state, torch.Generator):
                graph.register_generator_state(state)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            row = compute()
        log.info("speed: captured one micro batch as a CUDA graph")
        return CapturedMicroBatch(graph, row)


@dataclasses.dataclass(frozen=True)
class CapturedMicroBatch:
    """A captured micro batch, and the tensors into which it writes what the loss reduction reports."""

    graph: Any
    row: dict[str, torch.Tensor]

    def replay(self) -> dict[str, torch.Tensor]:
        """Compute the micro batch. Returns a copy of the row, because the next replay overwrites it."""
        self.graph.replay()
        return {name: value.clone() for name, value in self.row.items()}


def _shapes(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Size | None]:
    return {name: None if value is None else value.shape for name, value in batch.items()}


def _compute_micro_batch(
    forward_step_func: Any, iterator: Iterator[Any], model: Any, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Run forward and backward of one micro batch by Megatron's own steps; returns what the loss reduction reports."""
    config = get_model_config(model)
    rows: list[dict[str, torch.Tensor]] = []
    output, _ = schedules.forward_step(forward_step_func, iterator, model, num_microbatches, None, rows, config)
    schedules.backward_step(None, output, None, schedules.get_model_type(model), config)
    return rows[0]


@contextlib.contextmanager
def _preserved_random_states() -> Iterator[None]:
    """Restore the states of the device's random stream and of Megatron's named ones after the block."""
    tracker, default = get_cuda_rng_tracker(), random._get_cuda_rng_state()
    before = {
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in tracker.get_states().items()
    }
    yield
    random._set_cuda_rng_state(default)
    for name, state in tracker.get_states().items():
        if isinstance(state, torch.Generator):
            state.set_state(before[name])
        else:
            tracker.states_[name] = before[name]


def _move_gradient_hooks(stream: torch.cuda.Stream, model: Any) -> None:
    """Make Megatron's gradient hooks again on the capturing stream.

    Autograd runs a parameter's gradient accumulation on the stream that was current when its node was made. Megatron's
    DDP makes the nodes on the default stream, which cannot be captured, and keeps them.
    """
    ddp = get_attr_wrapped_model(model, "grad_accs", return_model_obj=True)
    ddp.grad_accs.clear()
    with torch.cuda.stream(stream):
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(ddp._make_backward_post_hook(parameter))
                ddp.grad_accs.append(node)
