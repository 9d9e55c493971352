"""NeMo imported once for all the processes of a test session: see server.py."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
VARIABLE = "CPT_FORK_SERVER"


@contextmanager
def serving() -> Iterator[None]:
    """Start the server, unless there is one, and let every process that is started from here find it.

    Returns at once: a request that comes before NeMo is imported waits until it is.
    """
    if VARIABLE in os.environ:
        yield
        return
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="fork-server-") as folder:
        path = Path(folder) / "socket"
        with (Path(folder) / "log").open("w") as log:
            command = [sys.executable, "-W", "ignore", str(FOLDER / "server.py"), str(path)]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        os.environ.update(found_by(path))
        try:
            yield
        finally:
            server.communicate()  # it ends with its standard input
            os.environ.clear()
            os.environ.update(before)


def found_by(path: Path) -> dict[str, str]:
    """The variables by which a Python process finds the server."""
    own = os.environ.get("PYTHONPATH")
    return {VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(filter(None, [str(FOLDER / "site"), own]))}


def variables() -> dict[str, str]:
    """Those that are set here, for a process that is started with an environment of its own."""
    return {key: os.environ[key] for key in (VARIABLE, "PYTHONPATH") if VARIABLE in os.environ}


def python_path(folder: Path) -> str:
    """`folder` as PYTHONPATH for a process that may be served."""
    return os.pathsep.join([str(FOLDER / "site"), str(folder)])


def real_start() -> dict[str, str]:
    """This environment without the server, for a process whose real start is what a test is about."""
    return {key: value for key, value in os.environ.items() if key != VARIABLE}
