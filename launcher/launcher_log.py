"""The launcher's own lines in runs/NAME/logs/attempt-N/launcher.log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from common import logs

log = logging.getLogger("launch")


class LauncherLog(logging.Handler):
    """Keeps lines in memory, and in a file as soon as the file's folder exists.

    The ranks (or the executor) make the folder of an attempt, so that a launch which fails before them leaves none.
    `path` is the file; it is None until the run is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path: Path | None = None
        self._lines: list[str] = []
        self.setFormatter(logging.Formatter(logs.FILE_FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line, and write all that are not written yet."""
        self._lines.append(self.format(record) + "\n")
        if self.path is None or not self.path.parent.is_dir():
            return
        try:
            with self.path.open("a") as stream:
                stream.writelines(self._lines)
        except OSError:  # a full disk: the console has the lines
            return
        self._lines.clear()


@contextlib.contextmanager
def keep_launcher_log() -> Iterator[LauncherLog]:
    """Keep this project's own lines in a LauncherLog inside this block."""
    handler = LauncherLog()
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
