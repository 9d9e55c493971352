"""Faults done on purpose to a real run: used by bench.drill and bench.fault_matrix."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from common import rank_states, run_status
from common.json_files import read_json_lines, read_json_object
from common.processes import is_alive
from common.run_status import read_status
from common.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class DrilledRun:
    """A run of a small recipe and the processes that it is made of.

    Args:
        folder: the working folder, which holds runs/NAME.
        corpus: a prepared corpus.
        words: further words of the command.
        recipe: what is trained.
    """

    folder: Path
    corpus: Path
    name: str
    words: Sequence[str]
    recipe: str = "qwen25_tiny"
    launcher: subprocess.Popen[bytes] | None = None
    starts: int = 0
    output: list[Path] = field(default_factory=list)

    @property
    def run(self) -> RunDir:
        return RunDir(self.name, self.folder / "runs")

    def start(self) -> None:
        """Start the run, or continue it if it has been started before."""
        again = self.run.spec_file.exists() and bool(self.run.attempts)
        if again and self.run.complete_checkpoints():
            words = ["resume", self.name]
        else:
            if again:  # it ended before its first checkpoint
                self.run.path.rename(self.run.path.with_name(f"{self.name}-before-{self.starts}"))
            words = ["--recipe", self.recipe, "--name", self.name, f"data.paths={self.corpus}", *self.words]
        self.starts += 1
        self.output.append(self.folder / f"{self.name}-{self.starts}.log")
        with self.output[-1].open("wb") as stream:
            command = [sys.executable, str(ROOT / "launch.py"), *words]
            self.launcher = subprocess.Popen(
                command, cwd=self.folder, stdout=stream, stderr=stream, start_new_session=True
            )

    def launcher_pid(self) -> int | None:
        """The process that launches: not the one that was started, where tests fork the one that works for it."""
        if self.launcher is None or self.launcher.poll() is not None:
            return None
        holder = read_json_object(self.run.path / ".lock-launcher")
        return holder["pid"] if holder and is_alive(holder["pid"]) else self.launcher.pid

    def exit_code(self) -> int | None:
        """The launcher's exit code, or None while it runs."""
        assert self.launcher is not None
        return self.launcher.poll()

    def last_words(self) -> str:
        """The last line of the launcher that says why it ended."""
        lines = self.output[-1].read_text(errors="replace").splitlines()
        return next((line for line in reversed(lines) if " WARNING " in line or " ERROR " in line), "nothing")

    @property
    def is_finished(self) -> bool:
        """The run has trained all its steps."""
        status = read_status(self.run.status)
        return status is not None and status.phase == run_status.DONE

    def last_step(self) -> int:
        """The newest logged training step."""
        rows = read_json_lines(self.run.metrics, last_bytes=1 << 16)
        return max((row["step"] for row in rows if "loss" in row), default=0)

    def ranks(self) -> list[rank_states.RankState]:
        """The ranks of the present attempt that run."""
        attempts = self.run.attempts
        return [state for state in (rank_states.read(attempts[-1]) if attempts else []) if state.is_alive()]

    def children(self, rank: int = 0) -> list[int]:
        """The processes that a rank has forked: data workers, and a writer while it saves."""
        for state in self.ranks():
            if state.rank == rank:
                try:
                    found = psutil.Process(state.pid).children()
                except psutil.NoSuchProcess:
                    return []
                return [child.pid for child in found if "resource_tracker" not in " ".join(_command(child))]
        return []

    def torchrun(self) -> int | None:
        """The process that starts the ranks of this machine, where there is one."""
        launcher = self.launcher_pid()
        if launcher is None:
            return None
        found = psutil.Process(launcher).children(recursive=True)
        return next((p.pid for p in found if any(word.endswith("torchrun") for word in _command(p))), None)

    def is_saving(self) -> bool:
        """A checkpoint is being written."""
        return any(self.run.checkpoints.glob("step-*-unfinished"))

    def processes(self) -> set[int]:
        """All processes of the run that are alive: the launcher, the ranks and all their descendants."""
        own = [self.launcher.pid] if self.launcher is not None and self.launcher.poll() is None else []
        found: set[int] = set()
        for pid in [*own, *(state.pid for state in self.ranks())]:
            try:
                process = psutil.Process(pid)
                found |= {pid, *(child.pid for child in process.children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
        return {pid for pid in found if is_alive(pid)}

    def losses(self) -> dict[int, float]:
        """Step -> loss; where a step was trained twice, as it was trained last."""
        return {row["step"]: row["loss"] for row in read_json_lines(self.run.metrics) if "loss" in row}

    def weights(self) -> dict[str, str]:
        """SHA-256 of the files of the last checkpoint that hold weights and optimizer state."""
        listed = json.loads((self.run.complete_checkpoints()[-1] / "run" / "files.json").read_text())
        return {name: row["sha256"] for name, row in listed.items() if name.endswith(".distcp")}


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def wait_for(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait until `condition()` is true; returns whether it was in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; returns whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def flip_bit(path: Path, rng: random.Random) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as stream:
        position = rng.randrange(path.stat().st_size)
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1 << rng.randrange(8)]))
