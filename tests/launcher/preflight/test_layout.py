"""The arithmetic of many ranks is checked before any of them starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.rundir import RunDir
from launcher.preflight.layout import layout
from recipes import registry


def _found(**changes: Any) -> dict[str, bool]:
    """problem -> fatal, for the two-node recipe with these changes."""
    plan = registry.resolve("qwen25_500m_multinode").plan
    shape = {name: changes.pop(name) for name in ("num_layers", "vocab_size") if name in changes}
    plan = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, **shape), **changes)
    return {finding.problem.what: finding.fatal for finding in layout(plan, RunDir("run"))}


def test_every_recipe_adds_up() -> None:
    for name in registry.recipes():
        assert not list(layout(registry.resolve(name).plan, RunDir("run"))), name


@pytest.mark.parametrize(
    ("changes", "problem", "fatal"),
    [
        ({"devices": 3}, "devices do not divide into model-parallel groups", True),
        ({"tensor_parallel": 4}, "the attention heads cannot be split over the tensor-parallel ranks", True),
        ({"tensor_parallel": 7, "devices": 7}, "the query groups cannot be split over the tensor-parallel ranks", True),
        ({"vocab_size": 151935}, "the vocabulary cannot be split over the tensor-parallel ranks", True),
        ({"tensor_parallel": 1}, "sequence parallel without tensor parallel", True),
        ({"seq_length": 2047}, "the sequence cannot be split", True),
        ({"context_parallel": 2, "seq_length": 2046}, "the sequence cannot be split", True),
        ({"devices": 1, "num_nodes": 4}, "tensor-parallel groups cross machines", True),
        ({"pipeline_parallel": 4}, "pipeline stages do not end where machines do", False),
        ({"pipeline_parallel": 1}, "virtual stages without a pipeline", True),
        ({"num_layers": 22}, "the layers do not divide into stages", True),
        ({"global_batch_size": 48}, "virtual stages take micro batches in rounds of PP", True),
        ({"global_batch_size": 16, "virtual_pipeline": None}, "the pipeline idles for long", False),
        ({"accelerator": "cpu"}, "no sequence or context parallelism on the CPU", True),
        ({"tensor_parallel": 0}, "a parallel size below 1", True),
    ],
)
def test_wrong_layouts(changes: dict[str, Any], problem: str, fatal: bool) -> None:
    assert _found(**changes).get(problem) is fatal
