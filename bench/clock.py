"""A callback that times the steps of a run, and writes the kernel table of a few more steps."""

# no `from __future__ import annotations`: NeMo-Run reads the constructor's types

from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from bench.timing import StopWatch, synchronize
from data.module import TRAINING_TOKENS


class MeasurementDone(Exception):  # noqa: N818 - not an error
    """Ends a run once all steps are timed; no checkpoint is written."""


class TimingCallback(pl.Callback):
    """Times `steps` steps after `warmup` steps (bench/timing.py), then ends the run.

    Args:
        warmup: steps before the clock starts, for compilation, graph capture and the allocator.
        steps: timed steps.
        losses: keep the loss of every step, as one device tensor each that is read at the end.
        profile: write a kernel table of three further steps to this file.
    """

    _PROFILED = 3

    def __init__(self, warmup: int, steps: int, losses: bool = False, profile: Optional[str] = None) -> None:
        self.watch, self.keep_losses, self.profile = StopWatch(warmup, steps), losses, profile
        self._losses: list[torch.Tensor] = []
        self._tokens = self._tokens_before = 0
        self._profiler: Any = None
        self._left = self._PROFILED

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._profiler is not None:
            self._left -= 1
            if self._left == 0:
                synchronize()
                self._profiler.stop()
                write_kernel_table(self._profiler, Path(str(self.profile)), self._PROFILED)
                raise MeasurementDone
            return
        if self.keep_losses:
            self._losses.append(trainer.callback_metrics["reduced_train_loss"].detach().clone())
        done = self.watch.step()
        if self.watch.started:
            self._tokens_before = TRAINING_TOKENS.unmasked
        if done:
            self._tokens = TRAINING_TOKENS.unmasked - self._tokens_before
            if self.profile is None:
                raise MeasurementDone
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def result(self, waited: float) -> dict[str, Any]:
        """The figures: tokens of all data-parallel ranks, everything else of this rank; `waited` as in StopWatch."""
        ranks = parallel_state.get_data_parallel_world_size()
        found = self.watch.result(self._tokens * ranks, waited) | {"data_parallel": ranks}
        return found | ({"losses": [float(loss) for loss in self._losses]} if self.keep_losses else {})


def write_kernel_table(profiler: Any, path: Path, steps: int) -> None:
    """Write the kernels by their time per step with their number, and how long the GPU was busy."""
    kernels: dict[str, list[float]] = {}
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    busy, end = 0.0, 0.0
    for event in events:
        start, stop = event.time_range.start, event.time_range.end
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        row = kernels.setdefault(event.name, [0.0, 0.0])
        row[0] += (stop - start) / 1e3 / steps
        row[1] += 1 / steps
    wall = (end - events[0].time_range.start) / 1e3 / steps
    lines = [f"{wall:.2f} ms per step, GPU busy {busy / 1e3 / steps:.2f} ms, {len(events) / steps:.0f} kernels"]
    for name, (ms, count) in sorted(kernels.items(), key=lambda item: -item[1][0]):
        lines.append(f"{ms:9.3f} ms {count:7.1f} x  {name[:160]}")
    path.write_text("\n".join(lines) + "\n")
