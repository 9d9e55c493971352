"""Starts, beside rank 0, a process per service of log.loggers, which sends what metrics.jsonl holds (report/send).

A process, and not a Lightning logger or a thread: a library that blocks on a dead server, crashes, starts threads or
asks a question does it there. The training loop writes metrics.jsonl as it does without loggers, so its losses are the
same to the last bit; and the process outlives a rank that is killed, so that the service still gets the last numbers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from common.commands import launch_command, python_path
from common.environment.merge import USER
from common.loggers import TITLES, WANDB, install_command, is_installed, parse_loggers
from common.rundir import RunDir

END_S, AFTER_FAILURE_S = 60.0, 10.0  # that rank 0 waits for them after the training; after a failure others wait for it
log = logging.getLogger("launch")


@contextlib.contextmanager
def sending(run: RunDir, loggers: str | None, attempt: int) -> Iterator[None]:
    """Send for the time of the block, on rank 0 only; afterwards wait a bounded time for the rest to be sent."""
    started = [process for name in parse_loggers(loggers) if (process := _start(run, name, attempt)) is not None]
    limit_s = AFTER_FAILURE_S
    try:
        yield
        limit_s = END_S
    finally:
        _wait(run, started, limit_s)


def _start(run: RunDir, name: str, attempt: int) -> subprocess.Popen[str] | None:
    """The process for one service; None, with a line that says why, if there will be none."""
    environment = environment_of_senders(os.environ, json.loads(run.env.read_text()) if run.env.is_file() else [])
    if name == WANDB and environment.get("WANDB_MODE") == "disabled":
        log.info("wandb: off, by WANDB_MODE=disabled in your environment")
        return None
    if not is_installed(name):  # a machine that the launcher could not look at
        log.warning("%s: not installed here, the training goes on without it: %s", name, install_command(name))
        return None
    command = [sys.executable, "-m", "report.send", str(run.path), name, str(attempt), str(os.getpid())]
    errors = run.attempt(attempt) / f"send-{name}.log"
    try:
        with errors.open("a") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the training
            )
    except OSError as problem:
        log.warning("%s: cannot be started (%s); the training goes on without", TITLES[name], problem)
        return None
    threading.Thread(target=_relay, args=(name, process), name=f"send-{name}", daemon=True).start()
    return process


def environment_of_senders(environ: Mapping[str, str], rows: list[dict[str, str]]) -> dict[str, str]:
    """The environment of this rank, without the WANDB_MODE that keeps other libraries from asking for a login.

    Args:
        rows: runs/NAME/env.json.
    """
    found = dict(environ)
    own = next((row for row in rows if row["key"] == "WANDB_MODE"), None)
    if own is not None and own["source"] != USER and found.get("WANDB_MODE") == own["value"]:
        del found["WANDB_MODE"]
    found["PYTHONPATH"] = python_path(found)
    found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def _relay(name: str, process: subprocess.Popen[str]) -> None:
    """What the process says, as lines of this rank's log."""
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        for line in process.stdout:
            level, _, text = line.rstrip("\n").partition(" ")
            log.log(logging.WARNING if level == "WARNING" else logging.INFO, "%s: %s", name, text)


def _wait(run: RunDir, processes: list[subprocess.Popen[str]], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    for process in processes:
        name = process.args[4] if isinstance(process.args, list) else ""
        try:
            code = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            command = launch_command("send", run.as_argument, name)
            log.warning("%s: not done within %.0f s, and stopped; `%s` sends the rest", name, limit_s, command)
            continue
        if code not in (0, 1):
            log.warning("%s: its process ended with code %d; send-%s.log beside this rank's says why", name, code, name)
