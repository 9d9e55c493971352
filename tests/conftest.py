"""Shared by all tests: a prepared corpus, and a way to serve many NeMo runs from one import."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
    os._exit(0)


def _picklable(error: BaseException) -> bool:
    import pickle

    try:
        return isinstance(pickle.loads(pickle.dumps(error)), BaseException)
    except Exception:
        return False


@pytest.fixture
def forked(tmp_path: Path) -> Callable[..., Any]:
    """`forked(function, *args)`: call it in a fork of this process, in a fresh folder; return or raise what it does.

    Megatron and NeMo keep global state, so each run needs a process; the fork has them imported already.
    """

    def call(function: Callable[..., Any], *args: Any, cwd: Path = tmp_path) -> Any:
        receive, send = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=_child, args=(send, function, args, cwd))
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

    return call
