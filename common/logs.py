"""Logging: this project's lines and other libraries' errors on the console, every library's lines in the log files."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import warnings
from pathlib import Path
from typing import TextIO

CONSOLE_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
CONSOLE_TIME = "%m-%d %H:%M:%S"  # short: with it and the level, 77 of 100 columns are left for the message
FILE_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# torch warns about the package name pynvml, and third-party sources have invalid escape sequences: each process that a
# checkpoint save starts would print them again
CHILD_PROCESSES_IGNORE = (FutureWarning, SyntaxWarning)
_COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
log = logging.getLogger("launch")


class _ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current `sys.stderr`, which a live progress bar replaces to put lines above itself."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None: ...

    def format(self, record: logging.LogRecord) -> str:
        """The line; WARNING and ERROR in colour on a terminal, unless NO_COLOR is set (https://no-color.org)."""
        text = super().format(record)
        if record.levelno not in _COLORS or os.environ.get("NO_COLOR") or not sys.stderr.isatty():
            return text
        return text.replace(record.levelname, f"{_COLORS[record.levelno]}{record.levelname}\x1b[0m", 1)


class _UntilFile(logging.handlers.MemoryHandler):
    """Keeps lines in memory until `log_to_file` names their file."""

    def __init__(self) -> None:
        super().__init__(capacity=sys.maxsize, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


def log_to_console(rank: int = 0, copy: Path | None = None) -> None:
    """Send this project's lines, and other libraries' errors, to standard error. Python's warnings become log lines.

    Args:
        rank: rank of this process; ranks other than 0 log errors only.
        copy: a file that also receives the console lines of rank 0, for a launcher on another machine to show.
    """
    handlers: list[logging.Handler] = [_ConsoleHandler()]
    if copy is not None and rank == 0:
        copy.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(_LogFile(copy))
    for handler in handlers:
        handler.setFormatter(
            logging.Formatter(CONSOLE_FORMAT if rank == 0 else f"rank {rank}: {CONSOLE_FORMAT}", CONSOLE_TIME)
        )
        handler.addFilter(lambda r: r.levelno >= logging.ERROR or (rank == 0 and r.name.startswith("launch")))
    root = logging.getLogger()
    root.handlers = [*handlers, _UntilFile()]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    silence_child_processes()
    for kind in CHILD_PROCESSES_IGNORE:  # this process may be such a child: its warnings go to the log file
        warnings.simplefilter("default", kind)


class _LogFile(logging.FileHandler):
    """A log file that a full disk cuts short without a traceback on the console for each line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def log_to_file(folder: Path, rank: int = 0) -> None:
    """Write every library's lines to folder/rank-R.log, also those logged since `log_to_console`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = _LogFile(folder / f"rank-{rank}.log")
    file.setFormatter(logging.Formatter(FILE_FORMAT))
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _UntilFile)]:
        handler.setTarget(file)
        handler.flush()
        root.removeHandler(handler)
    root.addHandler(file)


def hide_repeated_warnings() -> None:
    """Keep these warnings off the console, for commands that have no log file; `log_to_console` brings them back."""
    for kind in CHILD_PROCESSES_IGNORE:
        warnings.simplefilter("ignore", kind)
    silence_child_processes()


def silence_child_processes() -> None:
    """Keep warnings that every Python process would repeat off the console of the processes that this one starts."""
    os.environ.setdefault("PYTHONWARNINGS", ",".join(f"ignore::{kind.__name__}" for kind in CHILD_PROCESSES_IGNORE))
