"""Commands of this project: as the user can paste them, and what a process needs to import its modules."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from common.version import ROOT

_said: dict[str, str] = {}


def launch_command(*words: str) -> str:
    """`python launch.py WORDS...`, with the interpreter that runs this process."""
    return shlex.join([_interpreter(), "launch.py", *words])


def set_resume_command(command: str) -> None:
    """Say how the run of this process is resumed; `resume_command` repeats it in errors."""
    _said["resume"] = command


def resume_command() -> str:
    """What to type to continue the run of this process."""
    return _said.get("resume") or launch_command("resume", "NAME")


def python_path(environ: Mapping[str, str] = os.environ) -> str:
    """PYTHONPATH of a process that imports this project: the checkout, and then what `environ` has."""
    return os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))


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
