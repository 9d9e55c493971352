"""Encode shards in worker processes, which are started with spawn and end when their parent is gone.

With one worker, or one shard left, everything runs in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from common.errors import UserError
from data.prepare.encode import Encoder
from data.prepare.input_files import Shard, Source, hash_stored
from data.prepare.shard import ShardSpec, run_shard

_worker: dict[str, Any] = {}  # of a worker process, filled when it starts


def run_shards(
    todo: dict[int, Shard], sources: list[Source], spec: ShardSpec, workers: int, advance: Callable[[int], None]
) -> list[str]:
    """Encode the shards of `todo`; returns the SHA-256 of each source, which a thread computes meanwhile.

    Args:
        advance: called in this process with the input bytes done since its last call.

    Raises:
        UserError: from a shard, or when a worker was killed from outside.
        OSError: the disk is full, a file cannot be read.
    """
    # one process per core: the HF tokenizer must not start a thread per core in each of them
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with ThreadPoolExecutor(1) as hasher:
        hashes = [hasher.submit(hash_stored, source) for source in sources]
        try:
            if min(workers, len(todo)) > 1:
                _run_in_pool(todo, spec, min(workers, len(todo)), advance)
            elif todo:
                encoder = Encoder(spec.encoder)
                for index, shard in todo.items():
                    run_shard(index, shard, spec, encoder, advance)
            return [result.result() for result in hashes]
        except BaseException:
            hasher.shutdown(wait=False, cancel_futures=True)
            raise


def _run_in_pool(todo: dict[int, Shard], spec: ShardSpec, workers: int, advance: Callable[[int], None]) -> None:
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(spec, counter))
    try:
        _wait_for_shards({pool.submit(_run_in_worker, index, shard) for index, shard in todo.items()}, counter, advance)
        pool.shutdown()
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise _killed_error(workers) from None
        raise


def _wait_for_shards(waiting: set[Future[None]], counter: Any, advance: Callable[[int], None]) -> None:
    seen = 0
    while waiting:
        finished, waiting = wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
        now = counter.value
        advance(now - seen)
        seen = now
        for future in finished:
            future.result()


def _start_worker(spec: ShardSpec, counter: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker.update(spec=spec, counter=counter, encoder=Encoder(spec.encoder))


def _exit_with_parent() -> None:
    """End this process when its parent is gone; a worker of a pool would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(index: int, shard: Shard) -> None:
    run_shard(index, shard, _worker["spec"], _worker["encoder"], _add_to_counter)


def _add_to_counter(size: int) -> None:
    with _worker["counter"].get_lock():
        _worker["counter"].value += size


def _killed_error(workers: int) -> UserError:
    return UserError(
        "a worker process was killed",
        expected=f"{workers} workers that finish their shards",
        found="one was ended from outside, as the kernel's out-of-memory killer does",
        do="run the same command again with fewer --workers: it continues where it stopped",
    )
