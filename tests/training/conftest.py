"""Tiny real runs, each in a fork of the test process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.loggers import is_installed


def train(
    sample: Path, *words: str, name: str = "run", resume: bool = False, dataset: Any = None
) -> list[dict[str, Any]]:
    """Run qwen25_tiny in the current folder; return the rows of its metrics.jsonl.

    Called inside a fork. `dataset` replaces data.dataset_cls (a class, which the command line cannot name).
    """
    from common.spec import RunSpec
    from launcher import launch as execute
    from recipes import registry

    words = (f"data.paths={sample / 'prose'}", f"data.index_mapping_dir={Path.cwd() / 'cache'}", *words)
    spec = RunSpec(recipe="qwen25_tiny", name=name, resume=resume, overrides=words)
    if dataset is not None:
        recipe = registry.resolve("qwen25_tiny")
        build = recipe.build

        def with_dataset(plan: Any) -> Any:
            partial = build(plan)
            partial.data.dataset_cls = dataset
            return partial

        recipe.build = with_dataset
    assert execute.launch(spec) == 0
    return [json.loads(line) for line in Path("runs", name, "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def mlflow_is_here(monkeypatch: pytest.MonkeyPatch) -> bool:
    """MLflow is imported from MLFLOW_FOLDER, by this test and the processes that it starts: see tests/mlflow.txt."""
    if folder := os.environ.get("MLFLOW_FOLDER"):
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])))
    return is_installed("mlflow")


SHORT = ("trainer.val_check_interval=1000", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1")
