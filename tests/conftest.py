"""Shared by all tests: a prepared corpus, and NeMo imported once for all the runs of a session."""

from __future__ import annotations

import fcntl
import functools
import multiprocessing
import os
import re
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

ROOT = Path(__file__).resolve().parent.parent
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it, and so would all it starts
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same under nohup
os.environ.update(TORCHDYNAMO_DISABLE="1", OMP_WAIT_POLICY="PASSIVE", HF_HUB_OFFLINE="1")

SECONDS = {"slow": 30.0, "daemons": 20.0, "nemo": 8.0}  # of a test with this marker, on average

_SERVING = pytest.StashKey[ExitStack]()


_THREADS: list[int] = []  # of torch, before this process keeps to one


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is all about NeMo imports it: it is not read when `-m` leaves NeMo out."""
    if "not nemo" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return bool(re.search(r"^pytestmark = \[?\s*pytest\.mark\.nemo", collection_path.read_text(), re.M)) or None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start the fork server before the workers of pytest-xdist, which are forks too."""
    config.stash[_SERVING] = ExitStack()
    if "not nemo" in config.option.markexpr:  # transformers imports torch beside a tokenizer unless this says no
        os.environ.update(USE_TORCH="0", TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
    if config.getoption("numprocesses", 0) and "not nemo" not in config.option.markexpr:
        config.stash[_SERVING].enter_context(fork_server.serving())
    if not config.getoption("numprocesses", 0):  # this process runs tests itself
        from hypothesis import settings

        settings.register_profile("no deadline", deadline=None)  # a machine that is shared is slow at times
        settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, so that no worker is left with one of them at the end."""
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        seconds[item.path] += next((s for name, s in SECONDS.items() if item.get_closest_marker(name)), 0.1)
    items.sort(key=lambda item: -seconds[item.path])  # stable: the tests of a file keep their order


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start it for the processes of the tests that need NeMo."""
    if "not nemo" in session.config.option.markexpr and (heavy := _heavy_modules()):
        raise pytest.UsageError(f"a file of tests without pytest.mark.nemo imports {' and '.join(sorted(heavy))}")
    if any(item.get_closest_marker("nemo") for item in session.items) and not session.config.option.collectonly:
        session.config.stash[_SERVING].enter_context(fork_server.serving())
    _keep_to_one_thread()


def _keep_to_one_thread() -> None:
    """Let torch make no threads in this process: a fork has none of them, but waits for them in its first large sum."""
    torch = sys.modules.get("torch")
    if torch is not None and not _THREADS:
        _THREADS.append(torch.get_num_threads())
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_SERVING].close()


def _heavy_modules() -> set[str]:
    return {name for name in ("nemo", "torch") if name in sys.modules}


@pytest.fixture(autouse=True)
def _marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that imports NeMo or torch says so: the others are run while somebody waits for them."""
    before = _heavy_modules()
    yield
    if request.node.get_closest_marker("nemo") is None and _heavy_modules() - before:
        pytest.fail("this test imports NeMo or torch: mark it with pytest.mark.nemo")


@pytest.fixture(scope="session")
def sample() -> Path:
    """The embedded sample corpus, built once and kept (as `make demo` keeps it)."""
    from data.sample import build_sample

    (ROOT / "corpora").mkdir(exist_ok=True)
    with (ROOT / "corpora" / "lock").open("w") as lock:  # workers of pytest-xdist wait for the first
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_sample(ROOT / "corpora" / "sample")
    return ROOT / "corpora" / "sample"


def _child(send: Any, function: Callable[..., Any], args: tuple[Any, ...], cwd: Path) -> None:
    os.chdir(cwd)
    if _THREADS:
        sys.modules["torch"].set_num_threads(_THREADS[0])
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


@pytest.fixture(scope="session")
def nemo() -> None:
    """NeMo is imported in this process, so that its forks have it."""
    from common.load_nemo import load_nemo

    load_nemo()
    import nemo.collections.llm.api  # noqa: F401


@pytest.fixture
def forked(nemo: None, tmp_path: Path) -> Callable[..., Any]:
    """`forked(function, *args)`: `call_in_fork` in a fresh folder."""
    return functools.partial(call_in_fork, cwd=tmp_path)
