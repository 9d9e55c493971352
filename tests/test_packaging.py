"""Every folder with code is installed, has its place among the imports, and imports no torch unless it says so."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "nemo", "nemo_run", "megatron", "lightning", "transformers", "fiddle", "triton")
# what runs where torch is: these folders and modules may import it at their top
WITH_TORCH = (
    "bench",
    "convert",
    "data.datasets",
    "data.documents_read",
    "data.module",
    "data.ordered_dataset",
    "doctor.transport_rank",
    "recipes.build",
    "training",
)
IMPORT_ALL = """
import importlib, json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in json.loads(sys.argv[2]):
            raise ImportError(f"imports {name}")

sys.meta_path.insert(0, Block())
print(json.dumps([importlib.import_module(name).__file__ for name in json.loads(sys.argv[1])]))
"""


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


def _folders() -> list[str]:
    """Folders with code, in the layout of which README speaks."""
    return sorted({name.split("/")[0] for name in _tracked() if name.endswith("/__init__.py")} - {"tests"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what git knows, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in _tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(folder / "source")], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_every_folder(wheel: Path) -> None:
    """Templates and styles too: pyproject finds packages and their files by itself."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name for name in _tracked() if name.split("/")[0] in _folders()} | {"launch.py"}


@pytest.mark.slow
def test_every_light_module_imports_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the wheel and the third-party packages, of which torch and NeMo are locked away."""
    venv.create(tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    command += ["--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True)
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".py")
    ]
    light = [name for name in modules if not any(f"{name}.".startswith(f"{heavy}.") for heavy in WITH_TORCH)]
    done = subprocess.run(
        [python, "-W", "ignore", "-c", IMPORT_ALL, json.dumps(light), json.dumps(HEAVY)],
        cwd=tmp_path,
        env={"PYTHONPATH": sysconfig.get_path("purelib")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(tmp_path / "venv") for file in json.loads(done.stdout))
    assert len(light) > len(modules) / 2


def test_every_room_has_its_layer() -> None:
    """A new room has a place in the one direction of imports, and is searched for circles."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers, circles, _ = contracts["contracts"]
    assert sorted(contracts["root_packages"]) == sorted(circles["ancestors"]) == _folders()
    assert sorted(folder.strip() for layer in layers["layers"] for folder in layer.split("|")) == _folders()
