"""The first page of help, the help of each command, and what the light commands import."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.models import ArgumentInfo

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "nemo", "nemo_run", "transformers", "lightning", "megatron", "numpy")


def test_light_commands_import_nothing_heavy() -> None:
    code = (
        "import sys, launch\n"
        "for argv in (['--help'], ['recipes'], ['train', '--help'], ['data', '--help']):\n"
        "    code = launch._run(argv)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    if code or heavy:\n"
        "        sys.exit(f'{argv}: exit code {code}, imported {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "qwen25_tiny" in done.stdout


def test_help_fits_one_screen_and_shows_how_to_train() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "launch.py"), "-h"], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) < 60 and max(map(len, lines)) <= 100
    for shown in (
        "--recipe NAME",
        "docker, slurm, k8s",
        "Before training:",
        "data prepare",
        "convert export",
        "doctor",
    ):
        assert shown in done.stdout


def test_shell_completion_knows_the_commands() -> None:
    asked = {"COMP_WORDS": "launch.py rep", "COMP_CWORD": "1", "_LAUNCH.PY_COMPLETE": "complete_bash"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py")], env={**os.environ, **asked}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["report"], done.stderr


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    """Every command by what is typed, those inside groups too."""
    for name, command in group.commands.items():
        inside = getattr(command, "commands", None)
        yield from [(name, command)] if inside is None else [(f"{name} {sub}", one) for sub, one in _commands(command)]


def test_every_argument_and_option_has_a_help_text() -> None:
    import typer.main

    import launch

    for name, command in _commands(typer.main.get_command(launch.app)):
        assert not [parameter.name for parameter in command.params if not parameter.help], name


@pytest.mark.parametrize("option", ["--retries", "--cluster", "--config"])
def test_an_option_says_its_default_or_an_example(option: str) -> None:
    import typer.main

    import launch

    command = dict(_commands(typer.main.get_command(launch.app)))["train"]
    text = next(parameter.help for parameter in command.params if option in parameter.opts)
    assert "default: " in text or f"({option} " in text


def test_no_option_is_called_by_its_metavar() -> None:
    """Typer 0.27 names `shape: ... typer.Option(metavar="SHAPE")` --SHAPE: where they are alike, name it."""
    import launch

    commands = [one for app in (launch.app, launch.data, launch.convert) for one in app.registered_commands]
    for command in commands:
        for name, parameter in inspect.signature(cast(Any, command.callback), eval_str=True).parameters.items():
            for found in getattr(parameter.annotation, "__metadata__", ()):
                metavar = (getattr(found, "metavar", None) or "").lower()
                own_name = isinstance(found.default, str)  # where Annotated keeps the first name until it is read
                assert metavar != name or own_name or isinstance(found, ArgumentInfo), (command.callback, name)
