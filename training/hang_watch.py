"""Ends a rank that makes no progress for far longer than a step takes: nothing else would, and it holds its GPU."""

from __future__ import annotations

import collections
import faulthandler
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable

from common.commands import resume_command
from common.environment.merge import hang_limit_s
from common.errors import EXIT_RUN, ProjectError
from common.silence import Silence
from training import sigterm

FACTOR = 50.0  # times the median step; a step that compiles kernels takes this long at most
OUTSIDE = 4.0  # times the limit of a step: for the start, the first step, and what happens between steps
REPORT_S = 30.0  # to say what happened, which a file system that does not answer can block
log = logging.getLogger("launch")


class HangWatch:
    """A thread that looks whether the rank makes progress: a step, a batch of a validation, a part of a save.

    It does not run in a process that is stopped, or while C code holds the interpreter: launcher/rank_watch.py.

    Args:
        record_failure: writes an error text to this rank's state file.
        least_s: seconds without progress in a step that are never too long.
    """

    def __init__(self, record_failure: Callable[[str], None], least_s: float | None = None) -> None:
        self._record_failure = record_failure
        self._least_s = hang_limit_s(os.environ) if least_s is None else least_s
        self._steps: collections.deque[float] = collections.deque(maxlen=50)  # seconds
        self._began: float | None = None  # when the present step began; None outside of steps
        self._count = 0  # grows with all progress
        self._interval_s = min(1.0, self._least_s / 10)
        self._silence = Silence(self._interval_s)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread; it ends with `stop` or with the process."""
        threading.Thread(target=self._watch, name="hang-watch", daemon=True).start()

    def stop(self) -> None:
        """Look no longer."""
        self._stopped.set()

    def begin_step(self) -> None:
        """From now on the limit is that of a step."""
        self._began = time.monotonic()
        self._count += 1

    def end_step(self) -> None:
        """What follows until the next step is no part of it. A second call changes nothing."""
        if self._began is not None:
            self._steps.append(time.monotonic() - self._began)
            self._began = None
            self._count += 1

    def note_progress(self) -> None:
        """Something was done that is not a step."""
        self._count += 1

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which the rank is taken to hang."""
        if not self._steps:
            return OUTSIDE * self._least_s
        in_step = max(self._least_s, FACTOR * statistics.median(self._steps))
        return in_step if self._began is not None else OUTSIDE * in_step

    def look(self) -> float | None:
        """Seconds without progress, if these are too many."""
        seconds = self._silence.look(self._count)
        return seconds if seconds > self.limit_s else None

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval_s):
            if (seconds := self.look()) is not None:
                self._end(seconds)

    def _end(self, seconds: float) -> None:
        threading.Thread(target=_leave_later, name="hang-exit", daemon=True).start()
        median = statistics.median(self._steps) if self._steps else 0.0
        where = f"a step within {self.limit_s:.0f} s (the median step took {median:.2f} s)"
        if self._began is None:
            where = f"progress within {self.limit_s:.0f} s at the start, between steps and at the end"
        error = ProjectError(
            f"no step ended for {seconds:.0f} s",
            expected=where,
            found="the process is alive and makes no progress; the stacks of its threads are in its log",
            do=f"look at the last lines of the log for what it waits for, then continue: {resume_command()}",
        )
        log.error("%s", error.explain())
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.FileHandler) and handler.stream is not None:
                faulthandler.dump_traceback(handler.stream)
        self._record_failure(error.explain())
        sigterm.kill_children()
        os._exit(EXIT_RUN)


def _leave_later() -> None:
    """End the process even if the report of the hang hangs too."""
    time.sleep(REPORT_S)
    os._exit(EXIT_RUN)


_current: HangWatch | None = None  # of this process: one process is one rank


def start(record_failure: Callable[[str], None]) -> None:
    """Start watching this rank."""
    global _current
    stop()
    _current = HangWatch(record_failure)
    _current.start()


def stop() -> None:
    """Watch no longer."""
    global _current
    if _current is not None:
        _current.stop()
    _current = None


def begin_step() -> None:
    """A training step begins. Without a watch this and the next two do nothing."""
    if _current is not None:
        _current.begin_step()


def end_step() -> None:
    """The training step has ended."""
    if _current is not None:
        _current.end_step()


def note_progress() -> None:
    """Something was done that is not a step: a batch of a validation, a look at a save that has a limit of its own."""
    if _current is not None:
        _current.note_progress()
