"""What a run does not use of NeMo is not loaded, and is the real thing when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from common import lazy_imports
from common.lazy_imports import Lazy, LazyModule
from tests.fork_server import real_start

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 5600  # 5074 of a dry run; 8860 with all that NeMo imports
FILES = {
    "plain/__init__.py": "import time; time.sleep(0.2); one = 1; from plain import below",
    "plain/below.py": "from plain import one",
    "passing/__init__.py": (
        "from passing.inner import here as there\nfrom passing.inner import *\nfrom . import inner\nchanged = 0"
    ),
    "passing/inner.py": "here = object(); starred = object()",
    "passing/apart.py": "",
    "broken/__init__.py": "import not_installed_anywhere",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The packages of FILES, imported lazily."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    listed = {
        "plain": Lazy(""),
        "passing": Lazy("", passes_names_on=True, found_in={"starred": "passing.inner"}),
        "broken": Lazy(""),
        "absent": Lazy(""),
        "math": Lazy(""),
    }
    monkeypatch.setattr(lazy_imports, "MODULES", listed)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(tmp_path)
    lazy_imports.install()
    lazy_imports._names_passed_on.cache_clear()
    yield
    lazy_imports._names_passed_on.cache_clear()


def _is_lazy(name: str) -> bool:
    return type(sys.modules[name]) is LazyModule


@pytest.mark.usefixtures("packages")
def test_an_attribute_loads_the_module_and_an_import_does_not() -> None:
    plain = importlib.import_module("plain")
    exec("import plain; from importlib import import_module")
    assert _is_lazy("plain")
    assert plain.one == 1
    assert type(plain) is ModuleType
    assert sys.modules["plain"] is plain


@pytest.mark.usefixtures("packages")
def test_a_submodule_loads_its_package_first_and_once() -> None:
    plain = importlib.import_module("plain")
    below = importlib.import_module("plain.below")
    assert not _is_lazy("plain")
    assert plain.below is below is sys.modules["plain.below"]
    assert below.__spec__.loader is below.__loader__


@pytest.mark.usefixtures("packages")
def test_a_package_that_passes_names_on_runs_for_other_names_only() -> None:
    passing = importlib.import_module("passing")
    from_import: dict[str, Any] = {}
    exec("from passing import there, starred, inner\nimport passing.apart", from_import)
    assert _is_lazy("passing")
    assert passing.changed == 0
    assert not _is_lazy("passing")
    for name in ("there", "starred", "inner"):
        assert from_import[name] is getattr(passing, name)


@pytest.mark.usefixtures("packages")
def test_what_is_set_stays_set() -> None:
    passing: Any = importlib.import_module("passing")
    passing.changed = 2
    assert not _is_lazy("passing")
    assert passing.changed == 2


@pytest.mark.usefixtures("packages")
def test_threads_wait_for_the_load() -> None:
    plain, found = importlib.import_module("plain"), []
    threads = [threading.Thread(target=lambda: found.append(plain.one)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1, 1, 1, 1]


@pytest.mark.usefixtures("packages")
def test_errors_are_those_of_python() -> None:
    with pytest.raises(ModuleNotFoundError, match="absent"):
        importlib.import_module("absent")
    broken = importlib.import_module("broken")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
            _ = broken.anything
    with pytest.raises(AttributeError, match="two"):
        _ = importlib.import_module("plain").two
    sys.modules.pop("math")
    assert not isinstance(importlib.import_module("math"), LazyModule), "it is compiled"


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", before := list(sys.meta_path))
    monkeypatch.setenv(lazy_imports.SWITCH, "0")
    lazy_imports.install()
    assert sys.meta_path == before


@pytest.mark.nemo
def test_a_dry_run_loads_none_of_them(sample: Path, tmp_path: Path) -> None:
    """Count modules, not seconds: other processes make an import slower, but not larger."""
    code = """
import atexit, gc, json, runpy
from common import lazy_imports
def report():
    lazy = {name for name, module in sys.modules.items() if type(module) is lazy_imports.LazyModule}
    loaded = [name for name in lazy_imports.MODULES if name in sys.modules and name not in lazy]
    sys.stderr.write(json.dumps([len(sys.modules), len(lazy), loaded, gc.get_freeze_count()]))
atexit.register(report)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    words = [str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--dryrun", f"data.paths={sample / 'prose'}"]
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.argv = {words!r}\n{code}"],
        cwd=tmp_path,
        env={**real_start(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    modules, lazy, loaded, frozen = json.loads(run.stderr.splitlines()[-1])
    assert loaded == []
    assert lazy >= 10
    assert modules < MOST_MODULES
    assert frozen > 100_000, "objects that no later garbage collection looks at"


def _use_all() -> list[str]:
    """Load every listed module in this process; returns what is wrong."""
    wrong, before = [], {}
    elsewhere = [name for name in ("transformer_engine", "zarr", "jax") if importlib.util.find_spec(name) is None]
    listed = {
        name: entry
        for name, entry in lazy_imports.MODULES.items()
        if name.partition(".")[0] not in elsewhere and entry.needs not in elsewhere
    }
    for name, entry in listed.items():
        module = importlib.import_module(name)
        if type(module) is not LazyModule or not entry.passes_names_on:
            continue
        names = {*lazy_imports._names_passed_on(name), *entry.found_in} - {"*"}
        before[name] = {one: value for one in names if (value := lazy_imports._find_without_loading(module, one))}
        wrong += [f"{name}.{one} is not found in {entry.found_in[one]}" for one in entry.found_in.keys() - before[name]]
    for name, entry in listed.items():
        module = sys.modules[name]
        if len(dir(module)) < 10 or type(module) is not ModuleType:
            wrong.append(f"{name} is not loaded")
        for one, value in before.get(name, {}).items():
            if getattr(module, one) is not value:
                wrong.append(f"{name}.{one} is another object than the one its file binds")
        wrong += [f"{name}.{one} is missing" for one in entry.calls if not callable(getattr(module, one))]
    return wrong


@pytest.mark.nemo
def test_each_is_the_real_module_when_it_is_used(forked: Callable[..., Any]) -> None:
    assert forked(_use_all) == []


def _call_hamming() -> Any:
    import scipy.signal

    later = scipy.signal.hamming
    assert type(scipy.signal) is LazyModule
    return later(3).tolist(), scipy.signal.windows.hamming(3).tolist()


@pytest.mark.nemo
def test_a_function_found_later_gives_what_the_real_one_gives(forked: Callable[..., Any]) -> None:
    later, real = forked(_call_hamming)
    assert later == real


def _loaded() -> set[str]:
    """What is loaded of the listed modules, and of the second Lightning that one of them imports."""
    names = {*lazy_imports.MODULES, "pytorch_lightning"} & sys.modules.keys()
    return {name for name in names if not _is_lazy(name)}


def _continue_from_a_checkpoint() -> set[str]:
    """What llm.pretrain's look at a checkpoint loads of them; other tests may have loaded some before."""
    from nemo.collections.llm import api

    before = _loaded()
    api.set_modelopt_spec_if_exists_in_ckpt(types.SimpleNamespace(), "no/checkpoint")
    return _loaded() - before


@pytest.mark.nemo
def test_a_run_that_continues_a_checkpoint_loads_none_of_them(forked: Callable[..., Any]) -> None:
    assert forked(_continue_from_a_checkpoint) == set()


@pytest.mark.usefixtures("packages")
def test_what_needs_a_package_that_is_missing_fails_as_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lazy_imports.MODULES, "broken", Lazy("", needs="not_installed_anywhere"))
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        importlib.import_module("broken")


def _override_with_a_name_of_nemo() -> Any:
    from recipes import overrides, registry

    recipe = registry.resolve("qwen25_tiny")()
    overrides.apply_to_recipe(recipe, overrides.parse(["data=mock"]))
    return recipe.data.__fn_or_cls__.__name__


@pytest.mark.nemo
def test_names_that_nemo_registers_are_known(forked: Callable[..., Any]) -> None:
    """They are registered by recipes that are not loaded."""
    assert forked(_override_with_a_name_of_nemo) == "MockDataModule"
