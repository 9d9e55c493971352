"""A stop watch for training steps that never synchronizes between the first timed step and the last."""

from __future__ import annotations

import statistics
import time
from typing import Any

import psutil
import torch


def synchronize() -> None:
    """Wait until the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StopWatch:
    """Wall clock over `steps` steps after `warmup` steps, with one synchronization before and one after.

    Call `step()` after each step; it returns True once all are timed. The time of a single step is measured with
    device events (on a CPU with the host's clock).
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps
        self._done, self._start, self._seconds = 0, 0.0, 0.0
        self._first_step_at = 0.0
        self._marks: list[Any] = []

    @property
    def started(self) -> bool:
        """The step counted last is the final one of the warm-up: the clock starts now."""
        return self._done == self.warmup

    def step(self) -> bool:
        """Count one more step; True once all steps are timed."""
        self._done += 1
        if self._done == 1:
            synchronize()
            self._first_step_at = time.time()
        if self._done == self.warmup:
            synchronize()
            self._start = time.perf_counter()
        if self._done >= self.warmup:
            self._marks.append(_record_time())
        if self._done == self.warmup + self.steps:
            synchronize()
            self._seconds = time.perf_counter() - self._start
            return True
        return False

    def result(self, tokens: int, waited: float) -> dict[str, Any]:
        """The figures of the timed steps.

        Args:
            tokens: trained in the timed steps.
            waited: seconds that do not count as start-up.
        """
        times = [_seconds_between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        found = {
            "tokens_per_second": tokens / self._seconds,
            "step_p50": statistics.median(times),
            "step_p99": sorted(times)[min(len(times) - 1, int(0.99 * len(times)))],
            "steps": self.steps,
            "seconds_to_first_step": self._first_step_at - psutil.Process().create_time() - waited,
        }
        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name()
            found["peak_gib"] = torch.cuda.max_memory_reserved() / 2**30  # CUDA graphs are not in "allocated"
        return found


def _record_time() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(first: Any, second: Any) -> float:
    return float(second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3)
