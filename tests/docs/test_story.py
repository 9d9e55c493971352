"""The story: the page and the Makefile have the same commands, and they lead from the first to the last."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.rundir import RunDir
from tests import fork_server
from tests.docs.pages import ROOT

FROM_THE_PILOT = ("optim.config.lr=", "data.replay_share=")  # of the command that the Makefile takes from pilot.json
# 110 steps of 4 x 64 tokens: the pilot's budget then holds six trainings
LENGTH, SHORT = "--tokens 409600", "--tokens 28160 data.seq_length=64 model.config.seq_length=64"


def _commands() -> list[str]:
    lines = (ROOT / "docs/story.md").read_text().splitlines()
    return [line.removeprefix("    python launch.py ") for line in lines if line.startswith("    python launch.py ")]


def test_the_makefile_runs_the_commands_of_the_page() -> None:
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    run = next(line.partition(" := ")[2] for line in makefile.splitlines() if line.startswith("STORY_RUN"))
    recipe = makefile.partition("$(STORY): ")[2].partition("\n\n")[0].replace("$(STORY_RUN)", run)
    train = next(line for line in _commands() if line.startswith("--recipe"))
    for line in _commands():
        assert line == train or f"$(LAUNCH) {line}" in recipe, line
    added = shlex.split(recipe.partition("$$command ")[2].partition("&")[0])
    words = [word for word in shlex.split(train) if not word.startswith(FROM_THE_PILOT)]
    planned = [word for word in shlex.split(run) if not word.startswith(FROM_THE_PILOT)]
    assert sorted(words) == sorted(["--recipe", *planned, *added])


@pytest.mark.nemo
@pytest.mark.slow
def test_the_story_at_small_size(sample: Path, tmp_path: Path) -> None:
    """Every command of the page in its order, over 110 steps; the forecast is made afterwards."""
    for name in ("docs", "launcher", "report", "watch"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora/sample").symlink_to(sample)
    bare = {key: os.environ[key] for key in ("HOME", "HF_HUB_OFFLINE") if key in os.environ}
    environment = {**bare, "PATH": "/usr/bin:/bin", **fork_server.variables()}
    model = ["--recipe qwen25_tiny --name base max_steps=20", "convert export runs/base models/qwen25-tiny"]
    for line in [*model, *(line.replace(LENGTH, SHORT) for line in _commands())]:
        command = [sys.executable, str(ROOT / "launch.py"), *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    run = RunDir("story", tmp_path / "runs")
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert (
        sum("next_share" in row.get("forgetting_budget", {}) for row in rows) == 11
    )  # at each validation after step 0
    stages = [stage["name"] for stage in json.loads(run.ledger.read_text())["stages"]]
    assert stages[0] == "main" and stages[-1] == "anneal"
    page = (run.path / "report.html").read_text()
    assert "The forgetting budget" in page and "Stages" in page
    assert json.loads((run.path / "passport.json").read_text())
