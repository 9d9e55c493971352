"""Signals to a whole process group, and a rank whose torchrun is killed: it saves, stops, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.processes import is_alive
from common.rundir import RunDir

pytestmark = [pytest.mark.nemo, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
WORDS = ("trainer.max_steps=100000", "log.ckpt.every_n_train_steps=100000", "trainer.val_check_interval=100000")


@contextmanager
def _started(sample: Path, folder: Path, *words: str, by: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A launch in a process group of its own, with no process that another test has forked; killed at the end.

    Args:
        by: the words in front of the command, of a program that becomes it.
    """
    env = {name: value for name, value in os.environ.items() if name != "CPT_FORK_SERVER"}
    paths = [f"data.paths={sample / 'prose'}", f"data.index_mapping_dir={folder / 'cache'}"]
    command = [*by, sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--name", "a", *words, *WORDS]
    command += [*paths, "trainer.log_every_n_steps=1"]
    with (folder / "said").open("w") as said:
        launcher = subprocess.Popen(command, cwd=folder, env=env, stderr=said, start_new_session=True)
    try:
        yield launcher
    finally:
        for pid, session in _sessions().items():
            if session == launcher.pid:
                os.kill(pid, signal.SIGKILL)
        launcher.wait()


def _wait(ready: Callable[[], object], folder: Path) -> None:
    end = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < end, (folder / "said").read_text()
        time.sleep(0.1)


def _sessions() -> dict[int, int]:
    """Process -> its session, of all processes that have not ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z":
            found[int(path.parent.name)] = int(session)
    return found


def _check_saved(run: RunDir) -> None:
    (checkpoint,) = run.complete_checkpoints()  # none was due
    state = json.loads((run.attempt(1) / "rank-0.json").read_text())
    assert (state["state"], f"step-{state['step']}") == ("interrupted", checkpoint.name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_group_of_a_direct_run(number: signal.Signals, sample: Path, tmp_path: Path) -> None:
    """What `timeout`, a closing terminal and a container's stop do: data workers and writers get it too."""
    run = RunDir("a", tmp_path / "runs")
    with _started(sample, tmp_path, "data.num_workers=1") as launcher:
        _wait(lambda: run.metrics.exists() and '"step": 3,' in run.metrics.read_text(), tmp_path)
        assert len([pid for pid, session in _sessions().items() if session == launcher.pid]) > 1
        os.killpg(launcher.pid, number)
        assert launcher.wait(timeout=300) == 130, (tmp_path / "said").read_text()
        _check_saved(run)
        _wait(lambda: launcher.pid not in _sessions().values(), tmp_path)


def test_a_rank_whose_torchrun_is_killed(sample: Path, tmp_path: Path) -> None:
    run = RunDir("a", tmp_path / "runs")
    with _started(sample, tmp_path, "--executor", "local") as launcher:
        _wait(lambda: run.metrics.exists() and '"step": 3,' in run.metrics.read_text(), tmp_path)
        rank = json.loads((run.attempt(1) / "rank-0.json").read_text())["pid"]
        torchrun = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        assert b"torchrun" in Path(f"/proc/{torchrun}/cmdline").read_bytes()
        os.kill(torchrun, signal.SIGKILL)
        assert launcher.wait(timeout=300) == 130, (tmp_path / "said").read_text()
        assert not is_alive(rank)
        _check_saved(run)


def test_the_end_of_a_launcher_that_a_script_has_started_in_the_background(sample: Path, tmp_path: Path) -> None:
    """The shell of `launch.py ... &` in a script lets it ignore SIGINT, and its rank inherits that."""
    run = RunDir("a", tmp_path / "runs")
    by = ["bash", "-c", 'trap "" INT; exec "$@"', "bash"]
    with _started(sample, tmp_path, "--retries", "1", by=by) as launcher:
        _wait(lambda: run.metrics.exists() and '"step": 3,' in run.metrics.read_text(), tmp_path)
        launcher.terminate()
        assert launcher.wait(timeout=100) == 130, (tmp_path / "said").read_text()
        _check_saved(run)
