"""Numbers read from the GPU without making it wait."""

from __future__ import annotations

from typing import Any

import torch


class Later:
    """Numbers that the GPU may still have to compute, on their way to the host.

    Reading one at once makes the host wait for the GPU, and then the GPU for the host's next work. Read a step later,
    they are there while the GPU has the next step to do.

    Args:
        values: tensors of any device and shape, copied to the host in the order of the device's work; everything else
            is handed through.
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
    def here(self) -> bool:
        """Does `read` return without waiting?"""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> dict[str, Any]:
        """The values, tensors as Python numbers (lists of them, with dimensions)."""
        if self._copied is not None:
            self._copied.synchronize()
        return {
            name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in self._values.items()
        }
