"""Ends a rank in which no step ends for far longer than a step takes: nothing else would, and it holds its GPU."""

from __future__ import annotations

import collections
import faulthandler
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable

from common.environment.merge import collective_timeout_s
from common.errors import EXIT_RUN, ProjectError
from training import sigterm

FACTOR = 50.0  # times the median step; a step that compiles kernels takes this long at most
LEAST = 1.5  # times the collective timeout, so that an error that names a lost rank comes first
log = logging.getLogger("launch")


class HangWatch:
    """A thread that compares the time since the last step with the median step.

    Args:
        record_failure: writes an error text to this rank's state file.
        least_s: seconds without a step that are never too long.
    """

    def __init__(self, record_failure: Callable[[str], None], least_s: float | None = None) -> None:
        self._record_failure = record_failure
        self._least_s = LEAST * collective_timeout_s(os.environ) if least_s is None else least_s
        self._steps: collections.deque[float] = collections.deque(maxlen=50)  # seconds
        self._since: float | None = None  # when the present step began; None outside of steps

    def start(self) -> None:
        """Start the thread, which ends with the process."""
        threading.Thread(target=self._watch, name="hang-watch", daemon=True).start()

    def begin_step(self) -> None:
        self._since = time.monotonic()

    def end_step(self) -> None:
        """Validation and saving follow, which have their own limits."""
        if self._since is not None:
            self._steps.append(time.monotonic() - self._since)
        self._since = None

    @property
    def limit_s(self) -> float:
        """Seconds after which a step is taken to hang."""
        return max(self._least_s, FACTOR * statistics.median(self._steps)) if self._steps else 4 * self._least_s

    def _watch(self) -> None:
        while True:
            time.sleep(min(1.0, self._least_s / 10))
            since = self._since
            if since is not None and time.monotonic() - since > self.limit_s:
                self._end(time.monotonic() - since)

    def _end(self, seconds: float) -> None:
        median = statistics.median(self._steps) if self._steps else 0.0
        error = ProjectError(
            f"no step ended for {seconds:.0f} s",
            expected=f"a step within {self.limit_s:.0f} s (the median step took {median:.2f} s)",
            found="the process is alive and makes no progress; the stacks of its threads are in its log",
            do="look at the last lines of the log for what it waits for, then continue: --resume",
        )
        log.error("%s", error.explain())
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler) and handler.stream is not None:
                faulthandler.dump_traceback(handler.stream)
        self._record_failure(error.explain())
        sigterm.kill_children()
        os._exit(EXIT_RUN)
