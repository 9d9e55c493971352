"""When a failed run is started again, and as what."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from common.rank_states import RankState
from common.run_status import FAILED, Ending, RunStatus
from common.rundir import RunDir
from common.spec import RunSpec
from launcher.retries import Retries
from recipes.resolve import continue_run, resolve

SPEC = RunSpec(recipe="qwen25_tiny", name="a", executor="direct", retries=3, retry_wait=0.0)
# the micro batches of a step come in rounds of four: nine of four samples would not do
VIRTUAL_STAGES = (
    "trainer.strategy.pipeline_model_parallel_size=4",
    "trainer.strategy.virtual_pipeline_model_parallel_size=2",
)


def _run(tmp_path: Path, spec: RunSpec = SPEC, checkpoint: int | None = 20) -> RunDir:
    run = RunDir("a", tmp_path)
    run.path.mkdir(parents=True)
    run.spec_file.write_text(spec.to_json())
    if checkpoint is not None:
        (run.checkpoints / f"step-{checkpoint}" / "weights").mkdir(parents=True)
        (run.checkpoints / f"step-{checkpoint}" / "weights" / "metadata.json").write_text("{}")
    return run


def _fail(run: RunDir, step: int, **ending: object) -> None:
    RunStatus(phase=FAILED, step=step, ending=Ending(exit_code=1, **ending)).write(run.status)  # type: ignore[arg-type]


def test_from_the_newest_checkpoint_or_the_beginning(tmp_path: Path) -> None:
    run, retries = _run(tmp_path), Retries()
    _fail(run, 25, summary="rank 0 was killed", cause="killed", can_retry=True)
    assert retries.next_spec(run, 1) == dataclasses.replace(SPEC, resume=True)
    fresh = _run(tmp_path / "fresh", checkpoint=None)
    _fail(fresh, 5, summary="unknown", can_retry=None)
    assert Retries().next_spec(fresh, 1) == SPEC


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_not_after_these_exit_codes(tmp_path: Path, code: int) -> None:
    run = _run(tmp_path)
    _fail(run, 25, can_retry=True)
    assert Retries().next_spec(run, code) is None


def test_not_where_nobody_asked_or_it_cannot_help(tmp_path: Path) -> None:
    unasked = _run(tmp_path / "1", dataclasses.replace(SPEC, retries=0))
    queued = _run(tmp_path / "2", dataclasses.replace(SPEC, executor="slurm"))
    hopeless = _run(tmp_path / "3")
    for run in (unasked, queued):
        _fail(run, 25, can_retry=True)
        assert Retries().next_spec(run, 1) is None
    _fail(hopeless, 25, summary="the disk is full", cause="disk_full", can_retry=False)
    assert Retries().next_spec(hopeless, 1) is None
    assert Retries().next_spec(RunDir("never-written", tmp_path), 1) is None


def test_never_twice_for_the_same_reason_at_the_same_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, retries = _run(tmp_path), Retries()
    _fail(run, 25, summary="NaN", can_retry=None)
    assert retries.next_spec(run, 1) is not None
    _fail(run, 25, summary="no peer", can_retry=None)  # another reason
    assert retries.next_spec(run, 1) is not None
    _fail(run, 24, summary="NaN", can_retry=None)
    with caplog.at_level(logging.ERROR, logger="launch"):
        assert retries.next_spec(run, 1) is None
    assert "again at step 24, for the same reason and no further than step 25: NaN" in caplog.text
    _fail(run, 26, summary="NaN", can_retry=None)
    assert retries.next_spec(run, 1) is not None


def _kill(run: RunDir, attempt: int, beat: int, metrics: int | None = None) -> None:
    """A SIGKILL: the status has the start of the attempt, the rank's last heartbeat and metrics.jsonl more."""
    ending = Ending(exit_code=1, cause="killed", summary="killed", can_retry=True)
    RunStatus(phase=FAILED, step=0, attempt=attempt, started=100.0 * attempt, ending=ending).write(run.status)
    run.attempt(attempt).mkdir(parents=True, exist_ok=True)
    RankState(rank=0, step=beat).write(run.attempt(attempt))
    if metrics is not None:
        with run.metrics.open("a") as stream:
            stream.write(json.dumps({"step": metrics, "loss": 8.0, "time": 100.0 * attempt + 1}) + "\n")


def test_a_kill_is_where_the_run_was_and_not_where_its_last_heartbeat_says(tmp_path: Path) -> None:
    run, retries = _run(tmp_path, checkpoint=None), Retries()
    _kill(run, 1, beat=0, metrics=7)
    assert retries.next_spec(run, 1) is not None
    _kill(run, 2, beat=0, metrics=12)  # within the five seconds of a heartbeat, and further than before
    assert retries.next_spec(run, 1) is not None
    _kill(run, 3, beat=9)  # what attempt 2 wrote to metrics.jsonl is not of this one
    assert retries.next_spec(run, 1) is None
    _kill(run, 4, beat=13)
    assert retries.next_spec(run, 1) is not None


def test_as_often_as_asked(tmp_path: Path) -> None:
    run, retries = _run(tmp_path), Retries()
    for step in range(21, 24):
        _fail(run, step, can_retry=True)
        assert retries.next_spec(run, 1) is not None
    _fail(run, 24, can_retry=True)
    assert retries.next_spec(run, 1) is None


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (("data.micro_batch_size=2",), 1),
        (("data.micro_batch_size=1",), None),
        (("data.micro_batch_size=31", "data.global_batch_size=124", "trainer.devices=2"), 2),  # 62 to a replica
        (("data.micro_batch_size=9", "data.global_batch_size=36", "trainer.devices=4", *VIRTUAL_STAGES), 3),
    ],
)
def test_out_of_memory_takes_the_next_micro_batch_that_divides(
    words: tuple[str, ...], after: int | None, tmp_path: Path
) -> None:
    spec = dataclasses.replace(SPEC, executor="local", overrides=(*words, "trainer.max_steps=9"))
    run = _run(tmp_path, spec)
    _fail(run, 0, summary="out of memory", cause="cuda_oom", can_retry=False)
    again = Retries().next_spec(run, 1)
    if after is None:
        assert again is None
        return
    assert again is not None and again.overrides == (f"data.micro_batch_size={after}",)
    fresh = _run(tmp_path / "fresh", spec, checkpoint=None)
    _fail(fresh, 0, summary="out of memory", cause="cuda_oom", can_retry=False)
    begun = Retries().next_spec(fresh, 1)
    assert begun is not None
    assert begun.overrides == (*words[1:], "trainer.max_steps=9", f"data.micro_batch_size={after}")


def test_a_retry_reads_no_word_twice(tmp_path: Path) -> None:
    """`trainer.max_steps*=2` doubles the steps of the recipe, however often the run is started again."""
    run, retries = _run(tmp_path, dataclasses.replace(SPEC, overrides=("trainer.max_steps*=2",))), Retries()
    recorded = resolve(run.spec())
    _fail(run, 25, can_retry=True)
    again = retries.next_spec(run, 1)
    assert again is not None and continue_run(recorded, again).plan == recorded.plan
