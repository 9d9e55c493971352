"""Workarounds for bugs of the pinned libraries. Each names its versions; tests/training/test_compat.py proves them."""

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
    """Apply all workarounds. A second call changes nothing."""
    from training import checkpoint_writer

    restore_numpy_product()
    keep_mcore_data()
    checkpoint_writer.install()
    fix_virtual_stages()
    reduce_gloo_buckets_one_by_one()


def restore_numpy_product() -> None:
    """Restore `numpy.product`, which numpy 2 removed and megatron-core 0.12 and 0.13 call.

    Without it, saving the distributed optimizer fails.
    """
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # type: ignore[attr-defined]


def keep_mcore_data() -> None:
    """Keep megatron-core's own attribute `mcore_data` in a checkpoint's metadata; torch 2.11 writes a copy without it.

    Without it a run with the distributed optimizer saves without an error and cannot be resumed ('Metadata' object has
    no attribute 'mcore_data'; seen with torch 2.11 and megatron-core 0.13.1, not with torch 2.13).
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    if not hasattr(FileSystemWriterAsync.finish, "__wrapped__"):
        FileSystemWriterAsync.finish = _with_all_attributes(FileSystemWriterAsync.finish)


def _with_all_attributes(finish: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(finish)
    def finish_with_all_attributes(self: Any, metadata: Any, results: Any) -> None:
        finish(self, metadata, results)
        path = Path(self.path) / ".metadata"
        if not path.is_file():  # object storage
            return
        written = pickle.loads(path.read_bytes())
        missing = {name: value for name, value in vars(metadata).items() if name not in vars(written)}
        if missing:
            vars(written).update(missing)
            part = path.with_name(".metadata.part")
            part.write_bytes(pickle.dumps(written))
            part.replace(path)

    return finish_with_all_attributes


def fix_virtual_stages() -> None:
    """Let megatron-core 0.13 take the current virtual pipeline stage where no `vp_stage` is passed, as 0.12 does.

    nemo_toolkit 2.3 does not pass it. Without this a run with virtual stages fails ("vp_stage must be passed"), and
    would otherwise build an embedding into every chunk of the first stage.
    Test: tests/training/distributed/test_parallel.py.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import schedules

    if "vp_stage" not in inspect.signature(GPTModel.__init__).parameters or hasattr(GPTModel.__init__, "__wrapped__"):
        return
    GPTModel.__init__ = _build_for_current_stage(GPTModel.__init__)
    schedules.forward_step = _run_in_passed_stage(schedules.forward_step)
    for name in ("is_pipeline_first_stage", "is_pipeline_last_stage"):
        setattr(parallel_state, name, _ask_for_current_stage(getattr(parallel_state, name)))


def _build_for_current_stage(build: Callable[..., None]) -> Callable[..., None]:
    from megatron.core import parallel_state

    @functools.wraps(build)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("vp_stage") is None:
            kwargs["vp_stage"] = parallel_state.get_virtual_pipeline_model_parallel_rank()
        build(self, *args, **kwargs)

    return wrapped


def _run_in_passed_stage(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the passed stage the current one: the interleaved schedule of 0.13 passes it on and leaves that at 0."""
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


def _ask_for_current_stage(ask: Callable[..., bool]) -> Callable[..., bool]:
    from megatron.core import parallel_state

    @functools.wraps(ask)
    def wrapped(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
        current = parallel_state.get_virtual_pipeline_model_parallel_rank()
        stage = current if vp_stage is None else vp_stage
        return ask(ignore_virtual=ignore_virtual or stage is None, vp_stage=stage)

    return wrapped


def reduce_gloo_buckets_one_by_one() -> None:
    """Reduce gradient buckets one by one on a Gloo group; Megatron coalesces them, which Gloo cannot on GPU tensors.

    torch 2.11: `ProcessGroupGloo::allreduce_coalesced: unsupported device type cuda`. It costs no time: Gloo copies
    each bucket through the host anyway.
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
