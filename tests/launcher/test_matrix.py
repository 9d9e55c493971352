"""Every recipe with every executor, as dry runs of one process: each is quick, or refused with a reason."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ProjectError
from common.spec import RunSpec
from launcher.executor_table import EXECUTORS
from recipes.registry import recipes

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = {name: f"docs/clusters/{name}.yaml" for name in ("slurm", "k8s", "docker")}
MOST_S = 0.5  # of processor time, once NeMo is imported: another process may take the processor meanwhile


def _refusal(recipe: str, executor: str) -> str:
    """Why the executor does not take the recipe as it is; empty if it does."""
    plan = recipes()[recipe].plan
    if executor == "direct" and plan.world_size > 1:
        return "direct is one process"
    if executor == "local" and plan.num_nodes > 1:
        return "local is one machine"
    if executor == "docker" and plan.num_nodes > 1:
        return "the run takes more nodes than the cluster file"
    if executor == "mpirun" and plan.num_nodes > 1:
        return "the list of hosts does not hold"
    return ""


def _dry_runs() -> dict[str, tuple[str, float]]:
    """Each pair: the refusal (or an empty text), and the seconds that it took."""
    from launcher.launch import launch

    (Path.cwd() / "docs").symlink_to(ROOT / "docs")
    before, found = dict(os.environ), {}
    launch(RunSpec(recipe="qwen25_tiny", dryrun=True))  # imports what the others share
    for recipe in recipes():
        for executor in EXECUTORS:
            os.environ.clear()
            os.environ.update(before)
            began, refused = time.process_time(), ""
            spec = RunSpec(recipe=recipe, executor=executor, cluster=CLUSTERS.get(executor), dryrun=True)
            try:
                assert launch(spec) in (0, 3)  # 3: no GPU and no corpora here
            except ProjectError as error:
                refused = error.what
            found[f"{recipe} {executor}"] = refused, time.process_time() - began
            logging.getLogger("launch").info("matrix: %s %s: %s", recipe, executor, found[f"{recipe} {executor}"])
    return found


def test_every_recipe_on_every_executor(forked: Callable[..., dict[str, tuple[str, float]]]) -> None:
    found = forked(_dry_runs)
    assert len(found) == len(recipes()) * len(EXECUTORS)
    for pair, (refused, seconds) in found.items():
        wanted = _refusal(*pair.split())
        assert refused.startswith(wanted) and bool(refused) == bool(wanted), (pair, refused)
        assert seconds < MOST_S, (pair, seconds)
