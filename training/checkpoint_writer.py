"""Writes a checkpoint's files in other processes while training continues, and watches those processes.

megatron-core 0.12 and 0.13 never look at the exit code of a process that writes. When the kernel's out-of-memory killer
ends one, the rank waits for it for ever, or takes the results of the next save for its own and calls a checkpoint whole
that lacks a file. `install` replaces the three parts concerned:

- the queue for results, which is one extra process of 290 MB shared by all saves, by a file in memory per save;
- the function that writes, by one that also takes a checksum of each file;
- the caller, by one that looks at exit codes and gives up on a process that writes nothing for a quarter of an hour.

Test: tests/training/test_checkpoint_writer.py.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import multiprocessing
import os
import pickle
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from torch.distributed.checkpoint import filesystem

from common import processes
from common.checkpoint_files import SIDECAR
from common.errors import ProjectError
from training import hang_watch
from training.global_totals import sum_over_ranks
from training.sigterm import KILLED_WITHIN_S

STALLED_AFTER_S = 900.0  # a slow file system takes minutes to flush, but not this long for nothing
log = logging.getLogger("launch")
_fork = multiprocessing.get_context("fork")


class CheckpointError(ProjectError):
    """A checkpoint could not be written, so that training on would be for nothing (exit code 1)."""


def install() -> None:
    """Let Megatron save through this file. A second call changes nothing."""
    filesystem_async._get_write_results_queue = ResultFile
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write_files)
    async_utils.TemporalAsyncCaller = WatchedCaller


class ResultFile:
    """Takes one value from a forked process to its parent, through a file in memory that both have open.

    Unlike a pipe it holds any amount, so that the process need not wait until somebody reads; unlike a queue of a
    manager it needs no process. It has the methods of a queue that Megatron calls.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("checkpoint-results"), "w+b")

    def put(self, value: Any) -> None:
        pickle.dump(value, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Raises queue.Empty if nothing was put."""
        if os.fstat(self._file.fileno()).st_size == 0:
            raise queue.Empty
        self._file.seek(0)
        return pickle.load(self._file)


class HashedFile:
    """A file that is written from start to end, and the SHA-256 of what was written."""

    def __init__(self, path: str) -> None:
        self._path, self._digest = path, hashlib.sha256()
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by `finish`
        self.tell, self.flush = self._file.tell, self._file.flush

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._file.write(data)

    def finish(self) -> None:
        """Wait until the disk has the file, then write its checksum beside it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        Path(self._path + SIDECAR).write_text(self._digest.hexdigest())


def write_files(transforms: list[Any], *arguments: Any) -> NoReturn:
    """Write one rank's files of a checkpoint, each in a process of its own. Runs in a forked process, which it ends.

    Args:
        transforms: of torch's writer; one, or none with an old torch.
        arguments: of Megatron's function of which this takes the place; the last two are the files as (path, name,
            (objects, tensors)), and where to put the results: a dict of lists, or the exception.
    """
    *_, buckets, results = arguments
    processes.end_with_parent(os.getppid())
    processes.ignore_stop_signals()
    parts = [ResultFile() for _ in buckets]
    children = [
        _fork.Process(target=_write_file, args=(transforms, bucket, part, os.getpid()))
        for bucket, part in zip(buckets, parts, strict=True)
    ]
    for child in children:
        child.start()
    written: dict[int, Any] = {}
    for index, (child, part) in enumerate(zip(children, parts, strict=True)):
        child.join()
        name = buckets[index][1]
        try:
            written[index] = part.get_nowait()
        except queue.Empty:
            written[index] = RuntimeError(
                f"the process that wrote {name}: {processes.describe_exit(child.exitcode or 0)}"
            )
    failure = next((value for value in written.values() if isinstance(value, Exception)), None)
    results.put(failure or written)
    sys.exit(0 if failure is None else 1)


def _write_file(transforms: list[Any], bucket: Any, result: ResultFile, parent: int) -> None:
    """Write one file; put the list of torch's WriteResult, or the exception, into `result`."""
    processes.end_with_parent(parent)
    path, name, (objects, tensors) = bucket
    write_item: Any = filesystem._write_item  # its parameters differ between versions of torch
    options: dict[str, Any] = {}
    if "serialization_format" in inspect.signature(write_item).parameters:
        options["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
    try:
        file: Any = HashedFile(path)
        rows = [write_item(*transforms, file, data, item, name, **options) for item, data in (*objects, *tensors)]
        file.finish()
        result.put(rows)
    except Exception as problem:  # noqa: BLE001 - the rank raises it
        result.put(problem if isinstance(problem, OSError) else RuntimeError(f"{type(problem).__name__}: {problem}"))


class WatchedCaller(async_utils.TemporalAsyncCaller):
    """Megatron's caller of a process that writes a checkpoint, which notices when that process fails.

    It also holds the copies of the weights until they are written. Megatron copies the weights to page-locked memory,
    which is shared with the forked process, not copied on write. megatron-core 0.12 and 0.13 release the copies at
    once, and torch gives their memory to the next allocation: another checkpoint, or a batch. The file is then
    complete, readable and wrong: with two saves 3 s apart, step 40 had the weights of step 60. Later versions of
    Megatron hold the copies too (its pull request 2288).
    """

    def __init__(self) -> None:
        super().__init__()
        self.process: Any = None
        self.copies: Any = None
        self._buckets: list[Any] = []
        self._results: Any = None
        self._progress = (0, time.monotonic())  # bytes on the disk, and when they became so many

    def schedule_async_call(self, async_req: Any) -> None:
        """Copy the weights to the host, and start the process that writes them."""
        copy: Callable[[], Any] | None = async_req.preload_fn

        def copy_and_hold() -> Any:
            assert copy is not None
            self.copies = copy()
            return self.copies

        if async_req.async_fn is not None:
            _, self._buckets, self._results = async_req.async_fn_args
        super().schedule_async_call(async_req._replace(preload_fn=copy and copy_and_hold))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks have written their files; with `blocking`, wait until they have. To be called on all ranks.

        Raises:
            CheckpointError: on every rank, if one of them could not write.
        """
        while True:
            problem = self._problem()
            state = [int(self._is_running()), int(bool(problem))]
            running, failed = state if no_dist else sum_over_ranks(state).tolist()
            if failed:
                self._raise(problem)
            if not running:
                self.close()
                return True
            if not blocking:
                return False
            hang_watch.note_progress()  # STALLED_AFTER_S is the limit here
            time.sleep(0.05)

    def close(self) -> None:
        """Release the copies and the process, which has ended or is given up."""
        if self.process is not None:
            self.process.kill()  # no effect on one that has ended
            self.process.join(KILLED_WITHIN_S)
        self.process = self.copies = None

    def _is_running(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def _problem(self) -> str:
        """Why this rank's files cannot be written, or an empty text."""
        if self.process is None:
            return ""
        if not self.process.is_alive():
            return self._exit_problem() if self.process.exitcode else ""
        size = sum(path.stat().st_size for bucket in self._buckets if (path := Path(bucket[0])).exists())
        if size != self._progress[0]:
            self._progress = (size, time.monotonic())
        silent = time.monotonic() - self._progress[1]
        return f"nothing was written for {silent:.0f} s" if silent > STALLED_AFTER_S else ""

    def _exit_problem(self) -> str:
        assert self.process is not None
        try:
            return str(self._results.get_nowait())
        except queue.Empty:
            return f"the process that writes: {processes.describe_exit(self.process.exitcode)}"

    def _raise(self, problem: str) -> NoReturn:
        self.close()
        problems: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(problems, problem)
        found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text)
        name = Path(self._buckets[0][0]).parents[1].name if self._buckets else "a checkpoint"
        raise CheckpointError(
            f"{name} could not be saved",
            expected="every rank writes its files of the checkpoint",
            found=found,
            do="free memory or disk space, as the finding says, then continue from the checkpoint before it",
        )
