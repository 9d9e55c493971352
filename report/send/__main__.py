"""`python -m report.send runs/NAME SERVICE ATTEMPT PID`: what rank 0 starts beside itself (launcher/sending.py).

Lines for people go to standard output as `LEVEL text`; what libraries print goes to standard error.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from common.processes import ignore_stop_signals, is_alive
from common.run_status import ENDED, read_status
from common.rundir import RunDir
from report.send.open_service import open_service
from report.send.sender import Sender

END_S = 90.0  # from the end of the training to the end of this process; rank 0, if it lives, waits less


class End:
    """Whether an attempt has ended: its status says so, or the process that trained is gone."""

    def __init__(self, run: RunDir, attempt: int, pid: int) -> None:
        self._run, self._attempt, self._pid = run, attempt, pid

    def __call__(self) -> bool:
        if not is_alive(self._pid):
            return True
        status = read_status(self._run.status)
        return status is not None and status.attempt == self._attempt and status.phase in ENDED


def _leave_in_time(is_over: End) -> None:
    """End this process some time after the training, also if a library of the service blocks for ever."""
    while not is_over():
        time.sleep(1.0)
    time.sleep(END_S)
    _say("WARNING", f"not done {END_S:.0f} s after the training, and stopped")
    os._exit(1)


def _say(level: str, line: str) -> None:
    try:
        print(level, line, flush=True)
    except OSError:  # rank 0 is gone, and nobody reads
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the end of the process


def main(argv: list[str]) -> int:
    """Follow one attempt at a run; returns the exit code."""
    ignore_stop_signals()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    path, name, attempt, pid = argv
    run = RunDir.at(path)
    is_over = End(run, int(attempt), int(pid))
    threading.Thread(target=_leave_in_time, args=(is_over,), daemon=True).start()
    return 0 if Sender(run, name, open_service(name), _say).follow(is_over) else 1


if __name__ == "__main__":
    from common.processes import leave

    leave(main(sys.argv[1:]))
