"""Forward Ctrl-C and SIGTERM from the launcher to the ranks of its run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class ForwardSignals:
    """Inside this block both signals go to the ranks, and the launcher continues until the ranks have ended.

    Args:
        send: called with the number of signals so far: 1 asks the ranks to save and stop, 2 to stop at once, 3 or more
            kills them.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send, self._count = send, 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._forward) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._send(self._count)
