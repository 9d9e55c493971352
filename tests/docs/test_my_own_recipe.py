"""docs/my-own-recipe.md, followed: in a file of one's own, and kept in the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/my-own-recipe.md").read_text()


def _found(pattern: str) -> str:
    """The one group of the first place on the page that matches."""
    match = re.search(pattern, PAGE, flags=re.S | re.M)
    assert match, pattern
    return match[1]


BLOCK = _found(r"^```python\n(.*?)^```$")
NAME = _found(r"--recipe \S+\.py:(\S+) --dryrun")


def test_in_a_file_of_ones_own(tmp_path: Path) -> None:
    from recipes import registry

    file = tmp_path / _found(r"--recipe (\S+\.py):")
    file.write_text(BLOCK)
    found = registry.resolve(f"{file}:{NAME}")
    assert (found.plan.max_steps, found.plan.max_lr, found.plan.decay_end) == (1000, 1e-4, 1000)
    assert found.plan.replay_share == 0.25 and found.summary.startswith("Qwen2.5-0.5B continued")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of this project, in which the page's three steps are done but for the golden."""
    for word in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split():
        if (ROOT / word).is_file():
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / word, tmp_path / word)
    recipes, start = tmp_path / "recipes/qwen25.py", tmp_path / "docs/start.md"
    recipes.write_text(recipes.read_text() + "\n\n" + BLOCK[BLOCK.index("@recipe") :])
    last_row, new_row = r"^\| `qwen25_500m_multinode`.*\n", _found(rf"^ *(\| `{NAME}`.*?\n)")
    start.write_text(re.sub(last_row, lambda row: row[0] + new_row, start.read_text(), flags=re.M))
    return tmp_path


def _run(project: Path, *words: str, **environ: str) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=project, env=os.environ | environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kept_in_the_project(project: Path) -> None:
    """The style, and what looks at all recipes without NeMo."""
    _run(project, "-m", "ruff", "check", "recipes")
    _run(project, "-m", "ruff", "format", "--check", "recipes")
    assert NAME in _run(project, "launch.py", "recipes")
    tables = "tests/docs/test_docs.py::test_every_recipe_is_in_the_table_of_the_start_page"
    listed = "tests/recipes/test_plan.py::test_a_recipe_file_of_ones_own"
    _run(project, "-m", "pytest", "-m", "not nemo", tables, listed)


@pytest.mark.nemo
def test_its_golden_is_recorded(project: Path) -> None:
    words = _found(r"UPDATE_GOLDENS=1 \.venv/bin/python (-m pytest .*?)\n").split()
    _run(project, *words, UPDATE_GOLDENS="1")
    assert "max_steps: 1000" in (project / f"tests/goldens/config/{NAME}.yaml").read_text()
