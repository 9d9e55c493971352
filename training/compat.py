"""Workarounds where the pinned stack and newer libraries disagree: versions named, tests/training/test_compat.py."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy


def apply() -> None:
    """Make all corrections; twice does no harm."""
    numpy_product()
    keep_mcore_data()
    keep_what_is_being_written()
    virtual_stages()
    gloo_one_by_one()


def numpy_product() -> None:
    """megatron-core 0.12 and 0.13 call `numpy.product`, gone since numpy 2: saving the distributed optimizer dies."""
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod


def keep_mcore_data() -> None:
    """torch 2.11 writes a checkpoint's metadata from a copy without megatron-core's own attribute `mcore_data`.

    Without it a run with the distributed optimizer saves in silence and cannot be resumed ('Metadata' object has
    no attribute 'mcore_data'; seen with torch 2.11 and megatron-core 0.13.1, not with torch 2.13).
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if not hasattr(FileSystemWriterAsync.finish, "__wrapped__"):
        FileSystemWriterAsync.finish = _with_all_attributes(FileSystemWriterAsync.finish)


def _with_all_attributes(finish: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(finish)
    def whole(self: Any, metadata: Any, results: Any) -> None:
        finish(self, metadata, results)
        path = Path(self.path) / ".metadata"
        if not path.is_file():  # object storage
            return
        written = pickle.loads(path.read_bytes())
        lost = {name: value for name, value in vars(metadata).items() if name not in vars(written)}
        if lost:
            vars(written).update(lost)
            part = path.with_name(".metadata.whole")
            part.write_bytes(pickle.dumps(written))
            part.replace(path)

    return whole


def keep_what_is_being_written() -> None:
    """A checkpoint that is written in the background was overwritten by the next one's weights.

    Megatron copies the weights to page-locked memory and forks a process that writes them to the disk. Page-locked
    memory is shared with that process, not copied on write; megatron-core 0.12 and 0.13 let go of the copies at once,
    and torch hands their memory to whoever asks next: another checkpoint, or a batch. The file is then whole, readable
    and wrong: seen with two saves 3 s apart, step 40 had the weights of step 60. The copies are now held until the
    writer has ended. Later versions of Megatron do the same (its pull request 2288).
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

    if hasattr(TemporalAsyncCaller.close, "__wrapped__"):
        return
    schedule, close = TemporalAsyncCaller.schedule_async_call, TemporalAsyncCaller.close

    @functools.wraps(schedule)
    def schedule_and_hold(self: Any, async_req: Any) -> None:
        copy = async_req.preload_fn

        def copy_and_hold() -> Any:
            self.copies = copy()
            return self.copies

        schedule(self, async_req._replace(preload_fn=copy and copy_and_hold))

    @functools.wraps(close)
    def close_and_let_go(self: Any, *args: Any, **kwargs: Any) -> None:
        close(self, *args, **kwargs)  # waits for the writer
        self.copies = None

    TemporalAsyncCaller.schedule_async_call, TemporalAsyncCaller.close = schedule_and_hold, close_and_let_go


def virtual_stages() -> None:
    """megatron-core 0.13 wants to be told which virtual pipeline stage is meant; nemo_toolkit 2.3 does not know that.

    Stock, a run with virtual stages dies ("vp_stage must be passed"), and would otherwise build an embedding into
    every chunk of the first stage. Untold, the stage is now the current one, as in megatron-core 0.12.
    Test: tests/training/distributed/test_parallel.py.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import schedules

    if "vp_stage" not in inspect.signature(GPTModel.__init__).parameters or hasattr(GPTModel.__init__, "__wrapped__"):
        return
    GPTModel.__init__ = _at_current_stage(GPTModel.__init__)
    schedules.forward_step = _in_its_stage(schedules.forward_step)
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        setattr(parallel_state, name, _of_current_stage(getattr(parallel_state, name)))


def _at_current_stage(build: Callable[..., None]) -> Callable[..., None]:
    from megatron.core import parallel_state

    @functools.wraps(build)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("vp_stage") is None:
            kwargs["vp_stage"] = parallel_state.get_virtual_pipeline_model_parallel_rank()
        build(self, *args, **kwargs)

    return wrapped


def _in_its_stage(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The interleaved schedule of 0.13 hands the stage on as an argument and leaves the current one at 0."""
    from megatron.core import parallel_state

    @functools.wraps(forward)
    def wrapped(*args: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
        if vp_stage is None:
            return forward(*args, **kwargs)
        before = parallel_state.get_virtual_pipeline_model_parallel_rank()
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
        try:
            return forward(*args, vp_stage=vp_stage, **kwargs)
        finally:
            parallel_state.set_virtual_pipeline_model_parallel_rank(before)

    return wrapped


def _of_current_stage(ask: Callable[..., bool]) -> Callable[..., bool]:
    from megatron.core import parallel_state

    @functools.wraps(ask)
    def wrapped(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
        current = parallel_state.get_virtual_pipeline_model_parallel_rank()
        stage = current if vp_stage is None else vp_stage
        return ask(ignore_virtual=ignore_virtual or stage is None, vp_stage=stage)

    return wrapped


def gloo_one_by_one() -> None:
    """Gloo has no coalesced all-reduce of GPU tensors, and Megatron sums its gradient buckets coalesced.

    torch 2.11: `ProcessGroupGloo::allreduce_coalesced: unsupported device type cuda`. On a Gloo group the buckets are
    now summed one after the other, which costs nothing there: Gloo copies each through the host anyway.
    """
    import torch
    from megatron.core.distributed import param_and_grad_buffer as buffers

    coalesced = torch.distributed._coalescing_manager
    if buffers._coalescing_manager is not coalesced:
        return

    @functools.wraps(coalesced)
    def one_by_one(group: Any, device: Any = None, async_ops: bool = False) -> Any:
        if torch.distributed.get_backend(group) == "gloo" and not async_ops:
            return contextlib.nullcontext()
        return coalesced(group, device=device, async_ops=async_ops)

    buffers._coalescing_manager = one_by_one
