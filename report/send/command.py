"""`launch.py send RUN SERVICE`: send a run that is over, or follow one from a machine that reaches the service."""

from __future__ import annotations

import logging

from common.loggers import parse_loggers
from common.run_status import ENDED, SILENT, read_clock, read_status
from common.rundir import RunDir
from report.send.open_service import open_service
from report.send.sender import Sender

log = logging.getLogger("launch")


def send_run(run: RunDir, services: str) -> bool:
    """Send what the services do not have yet, one service after the other; returns whether all have everything.

    Raises:
        UserError: an unknown service, or one whose package is not installed.
    """

    def is_over() -> bool:
        status = read_status(run.status)
        return status is None or status.state(read_clock(run.status)) in (*ENDED, SILENT)

    senders = [(name, open_service(name)) for name in parse_loggers(services)]
    sent = []
    for name, service in senders:

        def say(level: str, line: str, name: str = name) -> None:
            log.log(logging.getLevelName(level), "%s: %s", name, line)

        sent.append(Sender(run, name, service, say).follow(is_over))
    return bool(sent) and all(sent)
