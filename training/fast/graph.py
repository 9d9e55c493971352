"""One micro batch as a CUDA graph: forward and backward are captured once, then replayed without Python.

A small model is launch-bound: a micro batch is a thousand kernels of a few microseconds each. The graph is captured
from Megatron's own `forward_step` and `backward_step`, so that it computes what Megatron's schedule computes.

Replicas exchange weights and gradients while they compute, if Megatron is asked to overlap (`trainer.strategy.ddp.
overlap_param_gather`, `overlap_grad_reduce`). No graph may hold such an exchange: its communicator could not be
destroyed before the graph (pytorch issue 115388). The micro batch is then captured in pieces, which end where a bucket
of gradients is complete or where a bucket of weights is read first, and the exchange starts between two pieces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
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
from training.fast.gathers import overlaps_gathers, start_gathers, wait_for_gathers

log = logging.getLogger("launch")


class GraphedSchedule:
    """Replaces `megatron.core.pipeline_parallel.schedules.forward_backward_no_pipelining`.

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
    def find_problem(config: Any, fused_lm_head: bool, sync_free_loss: bool, fused_qkv: bool) -> str | None:
        """Why this schedule cannot be used with a model of this Megatron configuration, or None."""
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
        ddp = _find_ddp(model)
        start_gathers(ddp)

        def compute() -> dict[str, torch.Tensor]:
            return _compute_micro_batch(forward_step_func, iter([self._batch]), model, num_microbatches)

        rows = []
        for number in range(num_microbatches):
            self._copy_batch(data_step(iterator))
            if self._warm_up_batches:
                wait_for_gathers(ddp)
                self._warm_up(compute, ddp)
            if self._captured is None or self._captured_for != num_microbatches:
                wait_for_gathers(ddp)
                self._captured = None  # free its memory before the next capture
                self._captured, self._captured_for = self._capture(compute, ddp), num_microbatches
            rows.append(self._captured.replay(is_last=number == num_microbatches - 1))
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

    def _warm_up(self, compute: Callable[[], Any], ddp: Any) -> None:
        """Compute the batch before the first micro batch of a step; leaves gradients and random states as before."""
        with _preserved_random_states():
            for _ in range(self._warm_up_batches):
                with ddp.no_sync():
                    compute()
                ddp.zero_grad_buffer()
                torch.cuda.empty_cache()  # the freed memory is in pieces too small for the next logits
        self._warm_up_batches = 0

    def _capture(self, compute: Callable[[], dict[str, torch.Tensor]], ddp: Any) -> CapturedMicroBatch:
        """Capture one forward and backward, without computing it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        _move_gradient_hooks(stream, ddp)
        torch.cuda.synchronize()
        gc.collect()  # a tensor that is freed during the capture must not be one from before it
        torch.cuda.empty_cache()
        pieces = PieceRecorder(ddp, CapturedGraph)
        with torch.cuda.stream(stream), pieces.recording():
            row = compute()
        log.info("speed: captured one micro batch as a CUDA graph%s", pieces.description())
        return CapturedMicroBatch(pieces.recorded, row)


class CapturedGraph:
    """A CUDA graph of the current stream, which is being captured from its making until `end`."""

    def __init__(self, previous: CapturedGraph | None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        for state in get_cuda_rng_tracker().get_states().values():  # attention draws from Megatron's named streams
            if isinstance(state, torch.Generator):
                self._graph.register_generator_state(state)
        pool = torch.cuda.graph_pool_handle() if previous is None else previous._graph.pool()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> None:
        """End the capture."""
        self._graph.capture_end()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of the micro batch, between two exchanges of the replicas.

    Args:
        graph: the CapturedGraph.
        reads: Megatron's bucket groups whose weights this part reads first.
        completes: the bucket groups whose gradients are complete after it.
    """

    graph: Any
    reads: list[Any]
    completes: list[Any]


class PieceRecorder:
    """Captures a micro batch in pieces: a new one begins where the replicas have something to exchange.

    Args:
        ddp: Megatron's `DistributedDataParallel`. Without overlapped exchanges there is one piece.
        capture: makes a graph that is being captured, from the graph before it (None for the first).
    """

    def __init__(self, ddp: Any, capture: Callable[[Any], Any]) -> None:
        self.recorded: list[Piece] = []
        self._ddp, self._capture = ddp, capture
        self._graph: Any = None
        self._reads: list[Any] = []
        self._read: set[Any] = set()
        self._incomplete = set(ddp.bucket_groups)  # whose gradients are not complete yet
        self._last: list[Any] = []

    def description(self) -> str:
        """What the log says about the pieces."""
        groups = sum(len(piece.completes) for piece in self.recorded)
        return f" in {len(self.recorded)} pieces, between which {groups} buckets are exchanged" if groups else ""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Capture what the block computes. Its backward pass runs in this thread, because it ends and begins graphs."""
        hooks, config, model = [], self._ddp.ddp_config, _find_gpt(self._ddp)
        if overlaps_gathers(self._ddp):
            self._reads = self._first_read_of(model.embedding)
            parts = [*model.decoder.layers, model.decoder.final_layernorm]
            # the output layer is not always called as a module, so its weights are waited for before the last norm
            owners = [*model.decoder.layers, model]
            for part, owner in zip(parts, owners, strict=True):
                hooks.append(part.register_forward_pre_hook(lambda *_, owner=owner: self._cut_before(owner)))
        if config.overlap_grad_reduce:
            for group in self._ddp.bucket_groups:
                group.start_grad_sync = functools.partial(self._cut_after, group)
        try:
            with torch.autograd.set_multithreading_enabled(False):
                self._begin()
                yield
                self._end(self._last)
        finally:
            if self._graph is not None:  # an error: the capture ends without hiding it
                with contextlib.suppress(RuntimeError):
                    self._graph.end()
            for hook in hooks:
                hook.remove()
            if config.overlap_grad_reduce:
                for group in self._ddp.bucket_groups:
                    del group.start_grad_sync
                    group.reset()  # it counts the gradients that are complete

    def _begin(self) -> None:
        self._graph = self._capture(self.recorded[-1].graph if self.recorded else None)

    def _end(self, completes: list[Any]) -> None:
        graph, self._graph = self._graph, None
        graph.end()
        self.recorded.append(Piece(graph, self._reads, completes))
        self._reads = []

    def _first_read_of(self, module: Any) -> list[Any]:
        """The bucket groups of the module's weights that nothing has read yet."""
        groups = [self._ddp.param_to_bucket_group[p] for p in module.parameters() if p.requires_grad]
        found = [group for group in dict.fromkeys(groups) if group not in self._read]
        self._read.update(found)
        return found

    def _cut_before(self, module: Any) -> None:
        if found := self._first_read_of(module):
            self._end([])
            self._begin()
            self._reads = found

    def _cut_after(self, group: Any) -> None:
        self._incomplete.remove(group)
        if not self._incomplete:  # nothing is left to compute: the piece ends with the micro batch
            self._last = [group]
            return
        self._end([group])
        self._begin()


@dataclasses.dataclass(frozen=True)
class CapturedMicroBatch:
    """A captured micro batch, and the tensors into which it writes what the loss reduction reports."""

    pieces: list[Piece]
    row: dict[str, torch.Tensor]

    def replay(self, is_last: bool) -> dict[str, torch.Tensor]:
        """Compute the micro batch. Returns a copy of the row, because the next replay overwrites it.

        Args:
            is_last: the gradients of the step are complete after it; their sums over the replicas are started.
        """
        for piece in self.pieces:
            for group in piece.reads:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            piece.graph.replay()
            if is_last:
                for group in piece.completes:
                    group.start_grad_sync()
        return {name: value.clone() for name, value in self.row.items()}


def _find_ddp(model: Any) -> Any:
    """What answers for Megatron's `DistributedDataParallel`: itself, or NeMo's wrapper, which passes attributes on."""
    return get_attr_wrapped_model(model, "grad_accs", return_model_obj=True)


def _find_gpt(ddp: Any) -> Any:
    return get_attr_wrapped_model(ddp, "decoder", return_model_obj=True)


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


def _move_gradient_hooks(stream: torch.cuda.Stream, ddp: Any) -> None:
    """Make Megatron's gradient hooks again on the capturing stream.

    Autograd runs a parameter's gradient accumulation on the stream that was current when its node was made. Megatron's
    DDP makes the nodes on the default stream, which cannot be captured, and keeps them.
    """
    ddp.grad_accs.clear()
    with torch.cuda.stream(stream):
        for parameter in ddp.module.parameters():
            if parameter.requires_grad:
                node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                node.register_hook(ddp._make_backward_post_hook(parameter))
                ddp.grad_accs.append(node)
