"""A run that cannot fit is refused before it starts: with any layout, on any executor, and with advice that fits."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from common.rundir import RunDir
from launcher.preflight import check as preflight
from launcher.preflight.room import RankGpu, advise_room, check_room
from recipes import memory, registry
from recipes.overrides import apply_to_plan, parse
from recipes.plan import Plan


def _plan(name: str = "qwen25_500m", **changes: Any) -> Plan:
    return dataclasses.replace(registry.resolve(name).plan, **changes)


def _findings(plan: Plan, gpu: RankGpu | None) -> list[tuple[bool, str]]:
    return [(one.fatal, one.problem.do) for one in check_room(plan, RunDir("x"), gpu)]


def test_it_is_refused_where_even_a_lower_peak_would_not_fit() -> None:
    plan = _plan(micro_batch_size=16)
    peak = memory.estimate(plan).gpu_gib
    assert _findings(plan, RankGpu(peak)) == []
    assert [fatal for fatal, _ in _findings(plan, RankGpu(peak * 0.97))] == [False]  # within the error of the estimate
    ((fatal, do),) = _findings(plan, RankGpu(peak * 0.95))
    assert fatal and do == "data.micro_batch_size=8, the largest that fits and divides the global batch"
    assert _findings(plan, None) == []


@pytest.mark.parametrize(
    ("plan", "gib"),
    [
        (_plan(micro_batch_size=32), 40.0),
        (_plan(micro_batch_size=32), 12.0),
        (_plan(micro_batch_size=2), 9.0),
        (_plan("qwen25_500m_multinode", micro_batch_size=32), 16.0),
        (_plan("qwen25_500m_single", micro_batch_size=4), 8.0),
    ],
)
def test_the_advice_fits(plan: Plan, gib: float) -> None:
    gpu = RankGpu(gib)
    assert [fatal for fatal, _ in _findings(plan, gpu)] == [True]
    advice = advise_room(plan, gpu)
    ways = [way for way in re.split(", or |; |, the", advice) if "=" in way]
    assert ways
    for way in ways:
        words = re.sub(r"--devices (\d+)", r"trainer.devices=\1", way).split()
        assert _findings(apply_to_plan(plan, parse(words)), gpu) == [], way


def test_a_model_too_large_for_the_cpu() -> None:
    shape = dataclasses.replace(registry.resolve("qwen25_500m").plan.shape, num_layers=24_000)
    ((fatal, do),) = _findings(_plan("qwen25_tiny", shape=shape), None)
    assert fatal and "a smaller model" in do
    assert _findings(_plan("qwen25_tiny"), None) == []


def test_it_is_part_of_the_preflight_wherever_the_gpu_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for ranks elsewhere, by what the cluster file says. Another machine may have the room."""
    plan, run = _plan(micro_batch_size=32), RunDir("run", tmp_path)
    with caplog.at_level(logging.INFO):
        (finding,) = preflight.check(plan, run, machine=False, data=False, gpu=RankGpu(24.0))
    assert finding.fatal and not finding.in_numbers
    assert "data.micro_batch_size=4" in caplog.text
    assert preflight.check(plan, run, machine=False, data=False) == []
