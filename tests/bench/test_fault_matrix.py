"""The fault matrix reports how each case ended, and continues after a failed one."""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench import fault_matrix
from bench.drill import Drill
from bench.fault_matrix import NOT_DONE, RIGHT, WRONG, Case, Outcome, choose_cases, do_case, run_matrix


class FakeRun:
    """A run of one process, its launcher, in its eighth step."""

    def __init__(self, path: Path, *, finishes: bool = True, seconds: float = 60.0) -> None:
        self.finishes, self.seconds, self.output = finishes, seconds, [path / "output"]
        self.launcher: Any = None
        self.starts, self.run = 1, argparse.Namespace(attempts=[])

    def start(self) -> None:
        self.launcher = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({self.seconds})"])

    def exit_code(self) -> int | None:
        code: int | None = self.launcher.poll()
        return code

    def last_step(self) -> int:
        return 8

    def is_saving(self) -> bool:
        return False

    def ranks(self) -> list[Any]:
        return []

    def children(self, rank: int) -> list[int]:
        return []

    def torchrun(self) -> int | None:
        pid: int = self.launcher.pid
        return pid

    def processes(self) -> set[int]:
        return {self.launcher.pid} if self.exit_code() is None else set()

    @property
    def is_finished(self) -> bool:
        if not self.finishes:
            raise subprocess.TimeoutExpired("launch.py", 240)
        self.launcher.kill()
        return True


def fake_run(path: Path, *, finishes: bool = True, seconds: float = 60.0) -> Any:
    return FakeRun(path, finishes=finishes, seconds=seconds)


def test_a_case_says_when_every_process_had_ended(tmp_path: Path) -> None:
    outcome = do_case(fake_run(tmp_path), Case("torchrun", "step", "KILL"))
    assert (outcome.verdict, outcome.exit_code, outcome.left) == (RIGHT, -9, 0)
    assert outcome.ended_s is not None and outcome.gone_s is not None and outcome.ended_s <= outcome.gone_s < 60


def test_a_process_that_does_not_exist_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_matrix, "FIND_S", 0.0)
    outcome = do_case(fake_run(tmp_path, seconds=1.0), Case("rank-1", "step", "KILL"))  # nobody ends it
    assert outcome.verdict == NOT_DONE
    assert outcome.cells() == ["NOT DONE: no such process in this phase"]


def test_a_run_that_does_not_finish_is_a_failed_case(tmp_path: Path) -> None:
    run = fake_run(tmp_path, finishes=False)
    outcome = do_case(run, Case("torchrun", "step", "KILL"))
    assert outcome.verdict == WRONG and "240" in outcome.problem
    assert run.processes() == set()


@pytest.mark.parametrize(("verdicts", "good"), [([RIGHT, RIGHT], True), ([WRONG, RIGHT], False)])
def test_the_matrix_goes_on_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verdicts: list[str], good: bool
) -> None:
    (tmp_path / "runs").mkdir()
    outcomes = iter([Outcome(NOT_DONE, "no such process in this phase"), *(Outcome(one, "") for one in verdicts)])
    monkeypatch.setattr(fault_matrix, "do_case", lambda run, case: next(outcomes))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    options = argparse.Namespace(ranks=1, targets="writer", phases="save", signals="KILL,TERM", stop_s=0.0)
    options.recipe, options.overrides = "qwen25_500m_single", []
    assert len(choose_cases(options)) == 2
    assert run_matrix(tmp_path, options) is good  # the first try of the first case was too late: it is tried again
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"2 cases: {verdicts.count(RIGHT)} right, {verdicts.count(WRONG)} wrong, 0 not done"


def test_a_fault_that_was_not_done_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has ended before the drill came to hit anything."""
    run = fake_run(tmp_path)
    run.start()
    run.launcher.kill()
    run.launcher.wait()
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    done = Drill(run, random.Random(1), ranks=1, disk=None)
    monkeypatch.setattr(done, "continue_until", lambda condition: None)
    done.do_one()
    assert done.tallies == {}
