"""Megatron on a CPU: the few CUDA names it calls, answered by the CPU for the length of one run.

Megatron-Core allocates with device="cuda" and asserts on `torch.cuda.*` tensor types. Each entry below
replaces one such name and is put back on exit. Entered only for a recipe whose trainer.accelerator is "cpu".
Verified with nemo_toolkit 2.3 and megatron-core 0.12/0.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")


def _host(factory: Callable[..., Any]) -> Callable[..., Any]:
    """The factory with device="cuda" read as "cpu"."""

    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return call


def _type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`tensor.type()` names the CUDA class, which Megatron's optimizers compare with."""
    kind = _tensor_type(self, *args, **kwargs)
    return kind.replace("torch.", "torch.cuda.", 1) if isinstance(kind, str) else kind


_tensor_type = torch.Tensor.type


class _Stream:
    """A stream on a machine without any: everything is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, _: Any) -> None: ...
    def synchronize(self) -> None: ...


def _seed(original: Callable[[int], None], seed: int) -> None:
    """NeMo's seeding stops short when there is no CUDA device: Megatron's named streams are seeded here."""
    from megatron.core import tensor_parallel

    original(seed)
    state = torch.get_rng_state()
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.set_rng_state(state)


def _swaps() -> list[tuple[Any, str, Any]]:
    import nemo.collections.llm  # noqa: F401 - it compiles functions on import, which must not see swapped names
    from megatron.core.tensor_parallel import random as mcore_random
    from nemo.lightning import megatron_init
    from nemo.lightning.io import pl as nemo_io

    cpu = torch.device("cpu")
    rows: list[tuple[Any, str, Any]] = [(torch, name, _host(getattr(torch, name))) for name in _FACTORIES]
    rows += [
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "type", _type),
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
        (megatron_init, "_set_random_seed", functools.partial(_seed, megatron_init._set_random_seed)),
        (nemo_io, "_fix_tensors_device", lambda checkpoint: checkpoint),
    ]
    return rows


@contextlib.contextmanager
def backend() -> Iterator[None]:
    """Run Megatron on the CPU inside this block."""
    missing = object()
    rows = _swaps()
    undo = [(owner, name, getattr(owner, name, missing)) for owner, name, _ in rows]
    try:
        for owner, name, value in rows:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(undo):
            delattr(owner, name) if value is missing else setattr(owner, name, value)
