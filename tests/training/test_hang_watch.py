"""A rank that makes no progress is ended; a long validation, a pause and a slow start are no hangs."""

from __future__ import annotations

import functools
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common import silence
from training import hang_watch, sigterm
from training.hang_watch import HangWatch

ROOT = Path(__file__).resolve().parents[2]
LEAST_S = 10.0  # and looks every second


class Clock:
    """A monotonic clock that a test sets forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(hang_watch, "time", found)
    monkeypatch.setattr(silence, "time", found)
    return found


def _pass(clock: Clock, watch: HangWatch, seconds: float) -> float | None:
    """Let time pass, with a look every second; returns what the first look found that found anything."""
    for _ in range(round(seconds)):
        clock.now += 1.0
        if (found := watch.look()) is not None:
            return found
    return None


def _step(clock: Clock, watch: HangWatch, seconds: float) -> float | None:
    watch.begin_step()
    found = _pass(clock, watch, seconds)
    watch.end_step()
    return found


def _watch() -> HangWatch:
    return HangWatch(lambda text: None, LEAST_S)


def test_steps_that_end_are_no_hang(clock: Clock) -> None:
    watch = _watch()
    assert [_step(clock, watch, 8) for _ in range(60)] == [None] * 60  # 480 s in all


def test_a_step_that_does_not_end(clock: Clock) -> None:
    watch = _watch()
    _step(clock, watch, 1)  # a limit of 50 s
    watch.begin_step()
    assert _pass(clock, watch, 50) is None
    assert _pass(clock, watch, 2) is not None


def test_the_first_step_and_the_start_have_more_time(clock: Clock) -> None:
    watch = _watch()
    assert _pass(clock, watch, 35) is None
    assert _step(clock, watch, 35) is None
    assert _pass(clock, _watch(), 42) is not None


def test_a_validation_may_take_longer_than_any_step(clock: Clock) -> None:
    """Its batches are progress, and it is no part of the step after which it comes."""
    watch = _watch()
    _step(clock, watch, 1)
    watch.begin_step()
    _pass(clock, watch, 1)
    watch.end_step()
    for _ in range(20):
        watch.note_progress()
        assert _pass(clock, watch, 30) is None
    watch.end_step()  # by the callback that comes last
    assert watch.limit_s == 4 * 50
    assert _pass(clock, watch, 210) is not None


def test_a_process_that_was_stopped_does_not_hang(clock: Clock) -> None:
    watch = _watch()
    _step(clock, watch, 1)
    watch.begin_step()
    _pass(clock, watch, 5)
    clock.now += 3600
    assert watch.look() is None


@pytest.mark.nemo
def test_the_validation_says_that_it_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has ended before it, and each batch that it computes counts."""
    from training import validation

    said: list[str] = []
    for name in ("end_step", "note_progress"):
        monkeypatch.setattr(hang_watch, name, functools.partial(said.append, name))
    batch: Any = dict.fromkeys(("tokens", "position_ids", "attention_mask", "labels"))

    def schedule(forward_step_func: Any, data_iterator: Any, num_microbatches: int, **_: Any) -> list[Any]:
        for _batch in range(num_microbatches):
            forward_step_func(data_iterator, lambda **_: None)
        return []

    monkeypatch.setattr(validation, "data_step", next)
    monkeypatch.setattr(validation, "packing_arguments", lambda batch, seq_length: {})
    monkeypatch.setattr(validation, "schedule_shape", lambda data: {})
    monkeypatch.setattr(validation, "num_model_chunks", lambda: 1)
    monkeypatch.setattr(validation, "finish_gathers", lambda model: None)
    monkeypatch.setattr(validation, "get_forward_backward_func", lambda: schedule)
    callback: Any = validation.DomainValidation(5, 3)
    model, data, measure = (SimpleNamespace(pipeline=None), SimpleNamespace(seq_length=8), cast(Any, None))
    callback.measure = lambda trainer: validation.forward_losses(model, [batch] * 3, data, measure)
    trainer = SimpleNamespace(callbacks=[], global_step=5, max_steps=9, datamodule=None)
    callback.on_train_batch_end(trainer, None)
    assert said == ["end_step", *["note_progress"] * 3]


class Stuck:
    """A child process that the kernel does not end: it waits for a disk."""

    def kill(self) -> None:
        pass

    def is_alive(self) -> bool:
        return True

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None, "it would wait for ever"


def test_a_child_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither here nor when Python ends, which waits for the children that it knows."""
    child, known = Stuck(), multiprocessing.process._children  # type: ignore[attr-defined]
    known.add(child)
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    before = signal.getsignal(signal.SIGCHLD)
    sigterm.kill_children()
    signal.signal(signal.SIGCHLD, before)
    assert child not in known


@pytest.mark.nemo
def test_a_checkpoint_writer_that_cannot_be_killed_is_not_waited_for() -> None:
    from training.checkpoint_writer import WatchedCaller

    caller = WatchedCaller()
    caller.process = Stuck()
    caller.close()
    assert caller.process is None


_REPORT_HANGS = """
import sys, threading, time
from training import hang_watch
hang_watch.REPORT_S = 0.2
def record(text):
    print(text, flush=True)
    if sys.argv[1] == "blocked":
        time.sleep(600)  # a file system that does not answer
watch = hang_watch.HangWatch(record, 0.05)
watch.start()
watch.begin_step()
time.sleep(600)
"""


@pytest.mark.parametrize("report", ["free", "blocked"])
def test_a_rank_that_hangs_is_ended_whatever_its_report_does(report: str) -> None:
    command = [sys.executable, "-c", _REPORT_HANGS, report]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode == 1
    assert "no step ended for" in ended.stdout
