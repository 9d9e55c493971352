"""Runs Megatron on a CPU: replaces the few CUDA functions that it calls for the duration of one run.

Megatron-Core allocates with device="cuda" and asserts on `torch.cuda.*` tensor types. `_replacements` lists each such
name with its stand-in; `emulate_cuda` puts the originals back on exit. It is used only for a recipe whose
trainer.accelerator is "cpu". Verified with nemo_toolkit 2.3 and megatron-core 0.12 and 0.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The tensor factory with device="cuda" read as "cpu"."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return call


_tensor_type = torch.Tensor.type


def _type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.type()` with the name of the CUDA class, with which Megatron's optimizers compare it."""
    name = _tensor_type(self, *args, **kwargs)
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name


class _Stream:
    """Stands in for `torch.cuda.Stream`; a CPU does everything in order already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...


def _set_all_seeds(original: Callable[[int], None], seed: int) -> None:
    """NeMo's seeding, and then that of Megatron's named random streams, which NeMo leaves out without a CUDA device."""
    from megatron.core import tensor_parallel

    original(seed)
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.set_rng_state(state)


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement) of every name to replace."""
    import nemo.collections.llm.api  # noqa: F401 - it compiles functions on import, which must see the original names
    from megatron.core.tensor_parallel import random as mcore_random
    from nemo.lightning import megatron_init
    from nemo.lightning.io import pl as nemo_io

    cpu = torch.device("cpu")
    rows: list[tuple[Any, str, Any]] = [(torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES]
    rows += [
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "type", _type_as_cuda),
        (torch.cuda, "current_device", lambda: cpu),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
        (torch.cuda, "current_stream", _Stream),
        (torch.cuda, "default_stream", _Stream),
        (mcore_random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (mcore_random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (megatron_init, "_set_random_seed", functools.partial(_set_all_seeds, megatron_init._set_random_seed)),
        (nemo_io, "_fix_tensors_device", lambda checkpoint: checkpoint),
    ]
    return rows


@contextlib.contextmanager
def emulate_cuda() -> Iterator[None]:
    """Answer Megatron's CUDA calls with the CPU inside this block."""
    # NeMo's loss imports it in the first step; torch.jit.script, which it calls, reads the source of what is replaced
    import nemo.collections.nlp.modules.common.megatron.utils  # noqa: F401

    missing = object()
    rows = _replacements()
    undo = [(owner, name, getattr(owner, name, missing)) for owner, name, _ in rows]
    try:
        for owner, name, value in rows:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(undo):
            delattr(owner, name) if value is missing else setattr(owner, name, value)
