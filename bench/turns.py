"""Run several benchmarks in one call: they import at the same time, and measure one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, TextIO


def measure_in_turns(
    commands: list[list[str]], log: TextIO, paths: list[str | None] | None = None, at_once: int = 6
) -> list[dict[str, Any]]:
    """Run each command (a benchmark with the option --wait) and return the JSON objects that they print, in order.

    A command that fails gives {"error": exit code and its last lines}; the others go on.

    Args:
        commands: arguments after `python -m`.
        log: receives the standard error of all commands, and each result as soon as it is there.
        paths: the PYTHONPATH of each command, None for this process's own.
        at_once: processes that import while another one measures.
    """
    running: list[subprocess.Popen[str]] = []
    results = []
    for index, _ in enumerate(commands):
        while len(running) < min(len(commands), index + at_once):
            path = paths[len(running)] if paths else None
            running.append(_start(commands[len(running)], log, path))
        results.append(_let_measure(running[index]))
        print(json.dumps({"command": commands[index]} | results[-1]), file=log, flush=True)
    return results


def _start(command: list[str], log: TextIO, path: str | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, "PYTHONPATH": path} if path is not None else None,
        text=True,
        bufsize=1,
    )


def _let_measure(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("READY"):
            process.stdin.write("go\n")
            process.stdin.flush()
        if line.startswith("{"):
            process.wait()
            return dict(json.loads(line))
    return {"error": f"exit code {process.wait()}: {''.join(lines[-5:])}"}
