"""Saving: processes that die, disks that are full, files that are damaged."""

from __future__ import annotations

import hashlib
import os
import queue
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint_files import LIST, find_damage
from common.errors import UserError
from common.rundir import RunDir
from common.stored_files import needed_bytes
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo
SAVES = (*SHORT, "log.ckpt.every_n_train_steps=2", "trainer.max_steps=6")


def _fail_in_save(sample: Path, step: int, fail: Callable[[str], None]) -> None:
    """Train, and call `fail(path)` in the process that writes a file of this step's checkpoint."""
    from training import checkpoint_writer

    finish = checkpoint_writer.HashedFile.finish

    def finish_or_fail(self: Any) -> None:
        if f"step-{step}/" in self._path:
            fail(self._path)
        finish(self)

    checkpoint_writer.HashedFile.finish = finish_or_fail
    train(sample, *SAVES)


def _kill(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_parent(_: str) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()  # the kernel ends this process with its parent


def _disk_full(path: str) -> None:
    raise OSError(28, "No space left on device", path)


@pytest.mark.parametrize(
    ("fail", "found"), [(_kill, "SIGKILL"), (_kill_parent, "SIGKILL"), (_disk_full, "No space left on device")]
)
def test_a_failed_save_ends_the_run(
    sample: Path, forked: Callable[..., Any], tmp_path: Path, fail: Any, found: str
) -> None:
    """It ends with the reason, and the checkpoint before is whole."""
    from training.checkpoint_writer import CheckpointError

    with pytest.raises(CheckpointError, match=f"(?s)step-4 could not be saved.*rank 0: .*{found}"):
        forked(_fail_in_save, sample, 4, fail)
    assert [path.name for path in RunDir("run", tmp_path / "runs").complete_checkpoints()] == ["step-2"]


LOG, WAITING = "runs/run/logs/attempt-1/rank-0.log", "is still being written; waiting"


def _save_late(sample: Path) -> tuple[list[int], list[str]]:
    """Train; the number of saves under way when each begins, and what NeMo's marker found already written."""
    from nemo import lightning as nl

    from training import checkpoint_writer, checkpoints

    pending, written = [], []
    finish = checkpoint_writer.HashedFile.finish
    stock = nl.ModelCheckpoint._save_checkpoint
    remove = nl.ModelCheckpoint.remove_checkpoint_unfinished_marker

    def save_and_count(self: Any, trainer: Any, path: str) -> None:
        pending.append(checkpoints._pending_saves(trainer))
        stock(self, trainer, path)

    def finish_late(self: Any) -> None:
        """Not before the next save asks for it, which the log says, however slow the steps are."""
        import time

        step, log = int(self._path.partition("step-")[2].partition("/")[0]), Path(LOG)
        end = time.monotonic() + 60
        while step < 6 and log.read_text().count(WAITING) < step // 2 and time.monotonic() < end:
            time.sleep(0.05)
        finish(self)

    def look(path: Any, barrier_before: bool = False) -> None:
        written.extend(sorted(p.name for p in (Path(str(path).removesuffix(".ckpt")) / "run").iterdir()))
        remove(path, barrier_before)

    nl.ModelCheckpoint._save_checkpoint = save_and_count
    nl.ModelCheckpoint.remove_checkpoint_unfinished_marker = staticmethod(look)
    checkpoint_writer.HashedFile.finish = finish_late
    train(sample, *SAVES)
    return pending, written


def test_one_save_at_a_time_and_whole_before_complete(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    pending, written = forked(_save_late, sample)
    assert pending == [0, 0, 0]  # the save before was waited for
    assert written == 3 * ["command.txt", "config.yaml", "env.json", "files.json", "ledger.json", "version.txt"]
    assert (tmp_path / LOG).read_text().count(WAITING) == 2


def _flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def _export(checkpoint: Path) -> None:
    from convert.export_run import export_run

    export_run(checkpoint, Path("out"))


def test_a_checkpoint_every_so_many_steps_stays(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    forked(train, sample, *SAVES, "log.ckpt.keep_last=1", "log.ckpt.keep_every_n_steps=4")
    found = [path.name for path in RunDir("run", tmp_path / "runs").complete_checkpoints()]
    assert found == ["step-4", "step-6"]  # step-2 made room


def test_a_damaged_checkpoint_is_set_aside(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    forked(train, sample, *SAVES)
    run = RunDir("run", tmp_path / "runs")
    older, newest = run.complete_checkpoints()
    whole = {path.name: path.read_bytes() for path in (newest / "weights").glob("*.distcp")}
    assert not find_damage(newest)
    listed = (newest / LIST).read_text()
    (newest / LIST).write_text(listed.replace('"bytes"', '"bites"', 1))
    assert find_damage(newest)
    (newest / LIST).write_text(listed)
    files = {path.name: path.stat().st_size for path in (newest / "weights").glob("*.distcp")}
    assert needed_bytes(newest / "weights") == files
    _flip_bit(next((newest / "weights").glob("*.distcp")))
    with pytest.raises(UserError, match="step-6 is damaged"):
        forked(_export, newest)
    assert not (tmp_path / "out").exists()
    rows = forked(train, sample, *SAVES, resume=True)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 5, 6]  # from step 4
    aside = next(run.checkpoints.glob("damaged-step-6-*"))
    assert "other content than when it was saved" in (aside / "damage.txt").read_text()
    assert {path.name: path.read_bytes() for path in (newest / "weights").glob("*.distcp")} == whole
    for checkpoint in run.complete_checkpoints():
        next((checkpoint / "weights").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="every checkpoint of runs/run is damaged"):
        forked(train, sample, *SAVES, resume=True)
    assert older.name == "step-4"


def _resume_with_other_weights(sample: Path) -> None:
    from training.strategy import Strategy

    load = Strategy.load_checkpoint

    def load_noise(self: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = load(self, *args, **kwargs)
        for name, value in checkpoint["state_dict"].items():
            if isinstance(value, torch.Tensor) and "weight" in name:
                value.normal_(std=2.0)
        return checkpoint

    Strategy.load_checkpoint = load_noise
    train(sample, *SAVES, "trainer.max_steps=8", "data.train_steps=8", resume=True)


def test_a_resumed_run_goes_on_with_its_loss(sample: Path, forked: Callable[..., Any]) -> None:
    from common.errors import GateError

    forked(train, sample, *SAVES, "data.train_steps=8")
    with pytest.raises(GateError, match="does not go on where it stopped"):
        forked(_resume_with_other_weights, sample)


def test_a_result_file_takes_any_value_from_a_child(tmp_path: Path) -> None:
    from training.checkpoint_writer import HashedFile, ResultFile

    results = ResultFile()
    with pytest.raises(queue.Empty):
        results.get_nowait()
    pid = os.fork()
    if pid == 0:
        results.put(list(range(1_000_000)))
        os._exit(0)
    os.waitpid(pid, 0)
    assert results.get_nowait() == results.get_nowait() == list(range(1_000_000))
    file = HashedFile(str(tmp_path / "file"))
    torch.save(torch.arange(1000), file)  # type: ignore[arg-type]
    file.finish()
    content = (tmp_path / "file").read_bytes()
    assert (tmp_path / "file.sha256").read_text() == hashlib.sha256(content).hexdigest()


def _copies_while_written() -> list[bool]:
    """Is there still what a background process writes: while it does, and after it has ended?"""
    import weakref
    from multiprocessing import get_context

    from megatron.core.dist_checkpointing.strategies import async_utils
    from torch import distributed

    from training import checkpoint_writer

    checkpoint_writer.install()
    checkpoint_writer.install()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    torch.cuda.synchronize = lambda device=None: None
    may_end, copies = get_context("fork").Event(), []

    def copy() -> torch.Tensor:
        copied = torch.ones(3)
        copies.append(weakref.ref(copied))
        return copied

    def write(_: object, copied: torch.Tensor, results: object) -> None:
        may_end.wait(60)

    caller = async_utils.TemporalAsyncCaller()
    caller.schedule_async_call(async_utils.AsyncRequest(write, (None, [], None), [], preload_fn=copy))
    found = [copies[0]() is not None, caller.is_current_async_call_done()]
    may_end.set()
    return [*found, caller.is_current_async_call_done(blocking=True), copies[0]() is not None]


def test_what_is_being_written_stays(forked: Callable[..., Any]) -> None:
    assert forked(_copies_while_written) == [True, False, True, False]
