"""Show what is appended to a file."""

from __future__ import annotations

import sys
import threading
from pathlib import Path


class Follower:
    """Copies what is appended to a file to standard error, until the block ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._end = path, threading.Event()
        self._start = path.stat().st_size if path.exists() else 0
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _copy(self) -> None:
        position = self._start
        while True:
            last = self._end.wait(0.2)
            if self._path.exists():
                with self._path.open(errors="replace") as stream:
                    stream.seek(position)
                    sys.stderr.write(stream.read())
                    sys.stderr.flush()
                    position = stream.tell()
            if last:
                return
