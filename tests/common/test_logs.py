"""The console shows this project's lines and errors, in colour on a terminal; the log file holds everything."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES = """
import logging
from common import logs
logs.log_to_console()
logging.getLogger("launch").info("ours")
logging.getLogger("launch").warning("careful")
logging.getLogger("launch").error("broken")
logging.getLogger("library").warning("chatter")
logging.getLogger("library").error("its failure")
"""


def _run(code: str, folder: Path, *, terminal: bool = False, **environ: str) -> str:
    """Standard error of Python code, which is a terminal if asked for."""
    parent, child = pty.openpty() if terminal else os.pipe()
    clean = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "PYTHONWARNINGS")}
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), **environ},
        stderr=child,
        check=True,
    )
    os.close(child)
    with open(parent, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 (a file descriptor)
        text = ""
        try:
            while part := stream.read(1):
                text += part
        except OSError:  # a closed terminal
            pass
        return text


def test_the_console_shows_our_lines_and_errors_of_others(tmp_path: Path) -> None:
    lines = _run(LINES, tmp_path).splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "INFO    ours",
        "WARNING careful",
        "ERROR   broken",
        "ERROR   its failure",
    ]
    assert all(len(line) - len(line.split(maxsplit=3)[3]) == 23 for line in lines)  # 77 columns of 100 are left


@pytest.mark.parametrize(("environ", "colors"), [({}, 3), ({"NO_COLOR": "1"}, 0)])
def test_warnings_and_errors_have_colour_on_a_terminal(tmp_path: Path, environ: dict[str, str], colors: int) -> None:
    text = _run(LINES, tmp_path, terminal=True, **environ)
    assert text.count("\x1b[0m") == colors
    assert ("\x1b[33mWARNING\x1b[0m careful" in text) == (colors > 0)


def test_no_colour_in_a_pipe_or_in_a_copy(tmp_path: Path) -> None:
    code = LINES.replace("log_to_console()", "log_to_console(copy=logs.Path('copy/console.log'))")
    assert "\x1b[" not in _run(code, tmp_path)
    assert _run(code, tmp_path, terminal=True).count("\x1b[0m") == 3
    copy = (tmp_path / "copy/console.log").read_text()
    assert copy.count("careful") == 2 and "\x1b[" not in copy and "chatter" not in copy


def test_other_ranks_show_errors_only(tmp_path: Path) -> None:
    lines = _run(LINES.replace("log_to_console()", "log_to_console(rank=1)"), tmp_path).splitlines()
    assert [line.startswith("rank 1: ") and line.endswith(("broken", "its failure")) for line in lines] == [True, True]


def test_the_file_holds_every_line_also_those_before_it(tmp_path: Path) -> None:
    """A warning of the compiler, as old third-party sources give it, is a line of the file and not of the console."""
    (tmp_path / "third_party.py").write_text("same = 1 is 1\n")
    code = f"""{LINES}
import pathlib, subprocess, sys
import third_party
logs.log_to_file(pathlib.Path("logs"))
logging.getLogger("library").info("later")
subprocess.run([sys.executable, "-c", "import third_party"], check=True)
"""
    path = f"{ROOT}:{tmp_path}"
    shown = _run(code, tmp_path, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    assert "SyntaxWarning" not in shown and "chatter" not in shown
    written = (tmp_path / "logs/rank-0.log").read_text()
    texts = ["launch: ours", "launch: careful", "library: chatter", "third_party.py:1: SyntaxWarning", "library: later"]
    assert [written.count(text) for text in texts] == [1, 1, 1, 1, 1]
    assert [written.index(text) for text in texts] == sorted(written.index(text) for text in texts)
    rank = code.replace("log_to_console()", "log_to_console(rank=1)").replace('"logs")', '"logs"), rank=1')
    _run(rank, tmp_path, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1", PYTHONWARNINGS="ignore::SyntaxWarning")
    assert "SyntaxWarning" in (tmp_path / "logs/rank-1.log").read_text()  # a rank started by a launcher


def test_a_full_disk_leaves_the_console_readable(tmp_path: Path) -> None:
    """Python's own handler prints a traceback for each line that it cannot write."""
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    shown = _run(
        LINES.replace("logs.log_to_console()", "logs.log_to_console(); logs.log_to_file(Path())").replace(
            "import logging", "import logging; from pathlib import Path"
        ),
        tmp_path,
    )
    assert "ours" in shown and "Traceback" not in shown, shown
