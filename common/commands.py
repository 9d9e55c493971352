"""Commands as the user can paste them: with this interpreter, quoted for a POSIX shell."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def launch_command(*words: str) -> str:
    """`python launch.py WORDS...`, with the interpreter that runs this process."""
    return shlex.join([_interpreter(), "launch.py", *words])


def _interpreter() -> str:
    """`python` where the shell finds this interpreter by that name, else its path, relative if it is below here."""
    found = shutil.which("python")
    if found is not None and os.path.realpath(found) == os.path.realpath(sys.executable):
        same_environment = Path(found).parent == Path(sys.executable).parent
        if same_environment:
            return "python"
    here = Path.cwd()
    path = Path(sys.executable)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
