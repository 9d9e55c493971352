"""What a launcher does with Ctrl-C and SIGTERM while the ranks of its run are at work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class PassedOn:
    """Both signals go to the ranks inside this block, and the launcher stays until they are done.

    Args:
        send: called with the count of signals so far, from 1: ask to save and stop, stop at once, kill.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send, self._count = send, 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._pass) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _pass(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._send(self._count)
