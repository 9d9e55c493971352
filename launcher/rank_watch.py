"""Ends a rank that shows no sign of life: one that is stopped, or in which C code holds the interpreter.

A rank watches itself with a thread (training/hang_watch.py), which does not run then. The launcher looks whether the
state that each rank writes every few seconds still changes. It looks at the ranks of its own machine only, since it
could not end another one: the ranks that wait for that one end within the collective timeout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

from common import processes, rank_states
from common.environment.merge import hang_limit_s
from common.errors import EXIT_RUN, ProjectError
from common.rank_states import RankState
from common.silence import Silence

START = 4.0  # times the limit: until the first rank has written its state
_GONE_WITHIN_S = 10.0  # a process that was killed
log = logging.getLogger("launch")


class RankWatch:
    """Inside this block the ranks that this process has started on this machine are watched.

    Args:
        logs: the folder of the attempt, where the ranks write their states.
        limit_s: seconds without a new state that are never too long; by default 1.5 times the collective timeout.
        interval_s: seconds between two looks.
    """

    def __init__(self, logs: Path, limit_s: float | None = None, interval_s: float = 5.0) -> None:
        self._logs, self._interval_s = logs, interval_s
        self._limit_s = hang_limit_s(os.environ) if limit_s is None else limit_s
        self._start = Silence(interval_s)
        self._silences: dict[int, Silence] = defaultdict(lambda: Silence(interval_s))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * _GONE_WITHIN_S)

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            states = rank_states.read(self._logs)
            if not states and self._start.look("no rank has started") > START * self._limit_s:
                self._end_start()
                return
            for state in states:
                if state.is_alive() and (seconds := self._silences[state.pid].look(state.time)) > self._limit_s:
                    self._end(state, seconds)

    def _end(self, state: RankState, seconds: float) -> None:
        """Kill a rank, and write for it why it ended."""
        error = ProjectError(
            f"rank {state.rank} has given no sign of life for {seconds:.0f} s",
            expected=f"a new state in {self._logs}/rank-{state.rank}.json within {self._limit_s:.0f} s",
            found=f"process {state.pid} on {state.host} {processes.describe_state(state.pid)}; it was killed",
            do="look at the last lines of its log and at the file system, then continue: --resume",
        ).explain()
        log.error("%s", error)
        os.kill(state.pid, signal.SIGKILL)
        end = time.monotonic() + _GONE_WITHIN_S
        while state.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        if state.is_alive():
            log.error("process %d does not end although it was killed: the kernel waits for a device", state.pid)
        dataclasses.replace(state, state=rank_states.FAILED, exit_code=EXIT_RUN, error=error, time=time.time()).write(
            self._logs
        )

    def _end_start(self) -> None:
        """Kill what should have become the ranks."""
        log.error("no rank has started within %.0f s: what starts them is killed", START * self._limit_s)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
