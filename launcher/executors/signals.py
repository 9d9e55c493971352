"""Forward Ctrl-C, SIGTERM and SIGHUP from the launcher to the ranks of its run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from common.processes import not_ignored

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What the ranks take for a Ctrl-C. Not SIGINT: where a script starts the launcher in the background (`launch.py &`),
# the shell lets it ignore SIGINT, a rank inherits that, and a SIGTERM to the launcher would be lost on the way.
CTRL_C = signal.SIGUSR1


class ForwardSignals:
    """Inside this block these signals go to the ranks, and the launcher continues until the ranks have ended.

    Args:
        send: called with 1, which asks the ranks to save and stop, and at a further Ctrl-C with 2, to stop at once, and
            then with more, which kills them. A closing terminal can send SIGHUP twice, which means nothing new.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send, self._count = send, 0
        self._before: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        """Whether the ranks were asked to stop: one that then ends without recording an error has not failed."""
        return self._count > 0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._forward) for number in not_ignored(_FORWARDED)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        if self._count == 0 or number == signal.SIGINT:
            self._count += 1
            self._send(self._count)
