"""One micro batch as a CUDA graph: forward and backward captured once, then replayed without Python.

A small model is launch-bound: a micro batch is a thousand kernels of a few microseconds each. The graph is captured
from Megatron's own `forward_step` and `backward_step`, so it computes what the plain schedule computes.
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

log = logging.getLogger("launch")


class GraphedSchedule:
    """Stands in for `megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining`.

    Args:
        warm_up: micro batches before the capture (initialisation, kernel choice, compilation), whose gradients are
            dropped: every step is computed by the graph, so a resumed run repeats the kernels of the whole one, and no
            step needs more memory than the others.

    Gradients are summed over the replicas after the last micro batch, outside the graph: a communicator that a graph
    holds cannot be destroyed before it (pytorch issue 115388).
    Upstream: megatron-core 0.14 has a graph of the whole iteration; this one does not grow with the number of micro
    batches.
    """

    def __init__(self, warm_up: int = 2) -> None:
        self.warm_up = warm_up
        self._recorded: Recorded | None = None
        self._batch = ReadyBatch()
        self._captured_for = 0

    @staticmethod
    def unfit(config: Any, ddp_config: Any, fused_lm_head: bool, sync_free_loss: bool) -> str | None:
        """Why this schedule cannot take over from a model of these Megatron configurations, or None."""
        if not torch.cuda.is_available():
            return "it needs a GPU"
        if config.cross_entropy_fusion_impl == "te" and not fused_lm_head:
            return (
                "Transformer Engine's cross-entropy cannot be captured: model.config.cross_entropy_fusion_impl=native"
            )
        if not sync_free_loss:
            return "NeMo's loss waits for the GPU: speed.sync_free_loss=True"
        if ddp_config.overlap_grad_reduce:
            return "its gradients are summed after the backward pass: trainer.strategy.ddp.overlap_grad_reduce=False"
        ranks = parallel_state.get_pipeline_model_parallel_world_size()
        ranks *= parallel_state.get_tensor_model_parallel_world_size()
        ranks *= parallel_state.get_context_parallel_world_size()
        return None if ranks == 1 else "it needs tensor, pipeline and context parallel size 1"

    def __call__(
        self, *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any
    ) -> list[dict[str, torch.Tensor]]:
        """Megatron's schedule protocol, for training steps (training/speed.py binds it to nothing else)."""
        model = model[0] if isinstance(model, list) else model
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator

        def compute() -> dict[str, torch.Tensor]:
            return _micro_batch(forward_step_func, iter([self._batch]), model, num_microbatches)

        rows = []
        for _ in range(num_microbatches):
            self._fill(data_step(iterator))
            if self.warm_up:
                self._run_in(compute, model)
            if self._recorded is None or self._captured_for != num_microbatches:
                self._recorded = None  # its memory first
                self._recorded, self._captured_for = self._capture(compute, model), num_microbatches
            rows.append(self._recorded.replay())
        if finalize := get_model_config(model).finalize_model_grads_func:
            finalize([model], None)
        return rows

    def _fill(self, batch: dict[str, torch.Tensor | None]) -> None:
        """Copy the batch to where the graph reads it."""
        if not self._batch:
            self._batch = ReadyBatch({name: value if value is None else value.clone() for name, value in batch.items()})
        for name, value in batch.items():
            if value is not None:
                self._batch[name].copy_(value)  # type: ignore[union-attr]

    def _run_in(self, compute: Callable[[], Any], model: Any) -> None:
        """Warm-up on the batch at hand, before a step's first micro batch; gradients are zero after it as before."""
        with _same_random_states():
            for _ in range(self.warm_up):
                compute()
                get_attr_wrapped_model(model, "zero_grad_buffer")()
                torch.cuda.empty_cache()  # else the next logits take new memory: what was freed is in pieces too short
        self.warm_up = 0

    def _capture(self, compute: Callable[[], dict[str, torch.Tensor]], model: Any) -> Recorded:
        """Record one forward and backward; nothing is computed yet."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        _gradients_on(stream, model)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        for state in get_cuda_rng_tracker().get_states().values():  # attention draws from Megatron's named streams
            if isinstance(state, torch.Generator):
                graph.register_generator_state(state)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            row = compute()
        log.info("speed: captured one micro batch as a CUDA graph")
        return Recorded(graph, row)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A captured micro batch and where it leaves what the loss reduction reports."""

    graph: Any
    row: dict[str, torch.Tensor]

    def replay(self) -> dict[str, torch.Tensor]:
        """Compute; the row is a copy, since the next replay writes over it."""
        self.graph.replay()
        return {name: value.clone() for name, value in self.row.items()}


def _micro_batch(
    forward_step_func: Any, iterator: Iterator[Any], model: Any, num_microbatches: int
) -> dict[str, torch.Tensor]:
    """Forward and backward of one micro batch through Megatron's own steps; returns what the loss reduction reports."""
    config = get_model_config(model)
    rows: list[dict[str, torch.Tensor]] = []
    output, _ = schedules.forward_step(forward_step_func, iterator, model, num_microbatches, None, rows, config)
    schedules.backward_step(None, output, None, schedules.get_model_type(model), config)
    return rows[0]


@contextlib.contextmanager
def _same_random_states() -> Iterator[None]:
    """The device's random stream and Megatron's named ones are after the block where they were before it."""
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


def _gradients_on(stream: torch.cuda.Stream, model: Any) -> None:
    """Make Megatron's gradient hooks anew, so that they run on the capturing stream.

    Autograd runs a parameter's gradient accumulation on the stream that was current when its node was made; Megatron's
    DDP makes and keeps the nodes on the default stream, which cannot be captured.
    """
    ddp = get_attr_wrapped_model(model, "grad_accs", return_model_obj=True)
    ddp.grad_accs.clear()
    with torch.cuda.stream(stream):
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(ddp._make_backward_post_hook(parameter))
                ddp.grad_accs.append(node)
