"""The arithmetic of many ranks is checked before any of them starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.rundir import RunDir
from launcher.preflight.layout import check_layout
from recipes import registry


def _found(**changes: Any) -> dict[str, bool]:
    """problem -> fatal, for the two-node recipe with these changes."""
    plan = registry.resolve("qwen25_500m_multinode").plan
    shape = {name: changes.pop(name) for name in ("num_layers", "vocab_size") if name in changes}
    plan = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, **shape), **changes)
    return {finding.problem.what: finding.fatal for finding in check_layout(plan, RunDir("run"))}


def test_every_recipe_adds_up() -> None:
    for name in registry.recipes():
        assert not list(check_layout(registry.resolve(name).plan, RunDir("run"))), name


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
        ({"global_batch_size": 16, "virtual_pipeline": None}, "the pipeline is idle for too long", False),
        ({"context_parallel": 2, "isolate_documents": True}, "isolated documents and context parallelism", True),
        ({"accelerator": "cpu"}, "no sequence or context parallelism on the CPU", True),
    ],
)
def test_wrong_layouts(changes: dict[str, Any], problem: str, fatal: bool) -> None:
    assert _found(**changes).get(problem) is fatal


def _pipeline(micro_batches: int, virtual_pipeline: int | None = None) -> dict[str, bool]:
    """Findings of two stages with so many micro batches of one sample per step, on two ranks."""
    changes = {"devices": 1, "tensor_parallel": 1, "sequence_parallel": False, "micro_batch_size": 1}
    return _found(**changes, global_batch_size=micro_batches, virtual_pipeline=virtual_pipeline)


def test_the_idle_share_of_a_pipeline() -> None:
    """(PP - 1) / (micro batches x VP + PP - 1) of a step: 1/5 with four micro batches is accepted, 1/4 is not."""
    assert _pipeline(4) == {}
    assert _pipeline(3) == {"the pipeline is idle for too long": False}
    assert _pipeline(2, virtual_pipeline=2) == {}  # 1 / (2 x 2 + 1)


def test_only_virtual_stages_need_rounds_of_micro_batches() -> None:
    assert _pipeline(5) == {}
    assert _pipeline(4, virtual_pipeline=3) == {}  # rounds of PP = 2, not of VP
    assert _pipeline(5, virtual_pipeline=2) == {"virtual stages take micro batches in rounds of PP": True}
