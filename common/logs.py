"""Console and file logging: our lines for people, everything for the file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
log = logging.getLogger("launch")


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what standard error is at that moment: a live progress bar puts lines above itself."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None: ...


def log_to_console(rank: int = 0, copy: Path | None = None) -> None:
    """Our own log lines, and other libraries' errors, on standard error.

    Args:
        rank: of the ranks of a run only rank 0 speaks; the others are heard when they fail.
        copy: a file that gets rank 0's lines too, for a launcher to show.
    """
    handlers: list[logging.Handler] = [_Console()]
    if copy is not None and rank == 0:
        copy.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(copy))
    for handler in handlers:
        handler.setFormatter(logging.Formatter(FORMAT if rank == 0 else f"rank {rank}: {FORMAT}"))
        handler.addFilter(lambda r: r.levelno >= logging.ERROR or (rank == 0 and r.name.startswith("launch")))
    root = logging.getLogger()
    root.handlers = handlers
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    # torch warns about the package name pynvml in every process that a checkpoint save starts
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")


def log_to_file(folder: Path, rank: int = 0) -> None:
    """Every library's lines from now on in folder/rank-R.log."""
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank-{rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def quiet_nemo() -> None:
    """NeMo's own console lines go to its file in the log folder only (it adds that file when a run starts)."""
    from nemo.utils import logging as nemo_logging

    nemo_logging.remove_stream_handlers()
