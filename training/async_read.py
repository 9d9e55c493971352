"""Reads numbers from the GPU without making it wait."""

from __future__ import annotations

from typing import Any

import torch


class AsyncRead:
    """Numbers that the GPU may still have to compute, while they are copied to the host.

    Reading a number at once makes the host wait for the GPU, and then the GPU for the host's next kernels. Read one
    step later, the copy has long ended, and the GPU is busy with the next step.

    Args:
        values: tensors of any device and shape are copied to the host, in the order of the device's work; every other
            value is returned by `read` as it is.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {
            name: value.detach().to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        self._copied: torch.cuda.Event | None = None
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values.values()):
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> dict[str, Any]:
        """Wait for the copy. Returns the values, with tensors as Python numbers (lists where they have dimensions)."""
        if self._copied is not None:
            self._copied.synchronize()
        return {
            name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in self._values.items()
        }
