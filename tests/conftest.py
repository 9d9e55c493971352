"""Shared by all tests: a prepared corpus, and a way to serve many NeMo runs from one import."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would all it starts
os.environ.update(TORCHDYNAMO_DISABLE="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="session")
def sample() -> Path:
    """The embedded sample corpus, built once and kept (as `make demo` keeps it)."""
    from data.sample import build_sample

    build_sample(ROOT / "corpora" / "sample")
    return ROOT / "corpora" / "sample"


def _child(send: Any, function: Callable[..., Any], args: tuple[Any, ...], cwd: Path) -> None:
    os.chdir(cwd)
    try:
        send.send((function(*args), None))
    except BaseException as error:  # noqa: BLE001 - handed to the parent
        traceback.print_exc()
        send.send((None, error if _picklable(error) else RuntimeError(f"{type(error).__name__}: {error}")))
    sys.stdout.flush()
    for writer in multiprocessing.active_children():  # NeMo's checkpoint writers outlive the run
        writer.terminate()
    os._exit(0)


def _picklable(error: BaseException) -> bool:
    import pickle

    try:
        return isinstance(pickle.loads(pickle.dumps(error)), BaseException)
    except Exception:
        return False


def call_in_fork(function: Callable[..., Any], *args: Any, cwd: Path, **kwargs: Any) -> Any:
    """Call it in a fork of this process, in folder `cwd`; return or raise what it does.

    Megatron and NeMo keep global state, so each run needs a process; the fork has them imported already.
    """
    receive, send = multiprocessing.Pipe(duplex=False)
    target = functools.partial(function, **kwargs)
    child = multiprocessing.get_context("fork").Process(target=_child, args=(send, target, args, cwd))
    child.start()
    send.close()
    try:
        result, error = receive.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"the forked run died with exit code {child.exitcode}") from None
    child.join()
    if error is not None:
        raise error
    return result


@pytest.fixture
def forked(tmp_path: Path) -> Callable[..., Any]:
    """`forked(function, *args)`: `call_in_fork` in a fresh folder."""
    return functools.partial(call_in_fork, cwd=tmp_path)
