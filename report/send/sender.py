"""Follows a run's files and sends what is new to one service, for as long as the run trains.

metrics.jsonl holds every number already, so nothing can be lost here: a service that fails is tried again later, from
the byte up to which it has the file, and `python launch.py send` does the same after the run.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from common.commands import launch_command
from common.run_status import FAILED, read_status
from common.rundir import RunDir
from report.send.rows import read_configuration, read_new_points
from report.send.service import Sent, Service

if TYPE_CHECKING:
    from collections.abc import Iterator

Say = Callable[[str, str], None]  # a level, INFO or WARNING, and a line
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0  # after a failure, before the next try; doubled each time


class Sender:
    """One run and one service.

    Args:
        name: the service's, as in log.loggers.
        say: gets what a person should read.
        now: seconds of a clock that does not go back.
    """

    def __init__(
        self, run: RunDir, name: str, service: Service, say: Say, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.run, self.name, self.service, self._say, self._now = run, name, service, say, now
        self._sent = Sent()
        self._is_open = False
        self._wait_s, self._next_try = 0.0, 0.0

    def follow(self, is_over: Callable[[], bool], interval_s: float = 1.0) -> bool:
        """Send until the run is over, then the report and what is left; returns whether the service has everything."""
        with _locked(self.run, f"send-{self.name}"):  # an attempt that was killed may be sent to its end yet
            self._sent = Sent.load(self.run, self.name)
            return self._follow(is_over, interval_s)

    def _follow(self, is_over: Callable[[], bool], interval_s: float) -> bool:
        while not is_over():
            self._try(self._send_new)
            time.sleep(interval_s)
        self._next_try = 0.0
        if self._try(self._send_new) and self._try(self._finish):
            return True
        command = launch_command("send", self.run.as_argument)
        self._say("WARNING", f"not everything is sent, and nothing is lost: `{command} {self.name}` sends the rest")
        return False

    def _try(self, step: Callable[[], None]) -> bool:
        """Call it, unless the last failure was a moment ago; the first of a row of failures is said."""
        if self._now() < self._next_try:
            return False
        try:
            step()
        except Exception as problem:  # of libraries, of the network, of a service: none may end this process
            if not self._wait_s:
                text = f"{type(problem).__name__}: {' '.join(str(problem).split())}"
                self._say("WARNING", f"no connection; the training goes on, and this is tried again ({text[:200]})")
            self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s or FIRST_WAIT_S)
            self._next_try = self._now() + self._wait_s
            return False
        if self._wait_s:
            self._say("INFO", "works again, and has what it missed")
        self._wait_s = 0.0
        return True

    def _send_new(self) -> None:
        if not self._is_open:
            self._say("INFO", self.service.open(self.run, self._sent, read_configuration(self.run)))
            self._sent.finished = False
            self._sent.save(self.run, self.name)
            self._is_open = True
        while True:
            points, offset = read_new_points(self.run.metrics, self._sent.bytes)
            if offset == self._sent.bytes:
                return
            self.service.log(points)
            self._sent.bytes = offset
            self._sent.save(self.run, self.name)

    def _finish(self) -> None:
        status = read_status(self.run.status)
        files = [path for path in (self._write_report(), self.run.config, self.run.metrics) if path and path.is_file()]
        if line := self.service.finish(status.phase if status else FAILED, files):
            self._say("INFO", line)
        self._sent.finished = True
        self._sent.save(self.run, self.name)

    def _write_report(self) -> Path | None:
        """The report page, written anew if the run has changed since it was; None if it cannot be written."""
        from report.report import PAGE, write_report

        page = self.run.path / PAGE
        with _locked(self.run, "report"):  # the senders of two services end together, and write one report
            try:
                newest = max(path.stat().st_mtime for path in (self.run.metrics, self.run.status) if path.exists())
                if not page.exists() or page.stat().st_mtime < newest:
                    write_report(self.run.path)
            except Exception as problem:  # a report that fails must not keep the numbers back
                self._say("WARNING", f"the report is left out ({type(problem).__name__}: {problem})")
                return None
        return page


@contextmanager
def _locked(run: RunDir, what: str) -> Iterator[None]:
    """One process at a time on this machine, or on all that share a file system with locks."""
    with (run.path / f".lock-{what}").open("w") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
