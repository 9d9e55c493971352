"""How long something has not changed, without comparing the clocks of two machines."""

from __future__ import annotations

import time

_NOTHING = object()


class Silence:
    """Looked at again and again; a pause of the observer itself (stopped, or its machine asleep) counts as two looks.

    Args:
        interval_s: seconds between two looks.
    """

    def __init__(self, interval_s: float) -> None:
        self._most_s = 2 * interval_s
        self._value: object = _NOTHING
        self._looked = self._seconds = 0.0

    def look(self, value: object) -> float:
        """Seconds since the value has changed as far as is known; 0 at the first look."""
        now = time.monotonic()
        if value == self._value:
            self._seconds += min(now - self._looked, self._most_s)
        else:
            self._value, self._seconds = value, 0.0
        self._looked = now
        return self._seconds
