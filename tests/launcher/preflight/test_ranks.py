"""Preflight of the ranks on this machine: GPU memory, FP8, shared memory, the port of the rendezvous."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import pytest

from common import machine_facts
from common.rundir import RunDir
from launcher.preflight import check as preflight
from launcher.preflight import ranks as preflight_ranks
from recipes import memory, registry
from recipes.plan import Plan

GB = 10**9


def _plan(**changes: Any) -> Plan:
    return dataclasses.replace(registry.resolve("qwen25_500m").plan, **changes)


def _card(index: int, free: float) -> machine_facts.Gpu:
    return machine_facts.Gpu(index, "NVIDIA Test", 80 * GB, int(free * GB), f"GPU-{index}{index}ab-cd", 1)


def _told(findings: Any) -> list[tuple[bool, str]]:
    rows = [(one.fatal, str(one.problem)) for one in findings]
    assert all(one.problem.expected and one.problem.found and one.problem.do for one in findings)
    return rows


def test_memory_of_each_card_that_gets_a_rank() -> None:
    cards = machine_facts.Gpus(visible=(_card(0, 79), _card(1, 5), _card(2, 1)))
    assert _told(list(preflight_ranks.check_gpu_memory(_plan(devices=1), cards))) == []
    ((fatal, text),) = _told(list(preflight_ranks.check_gpu_memory(_plan(devices=2), cards)))
    assert fatal and "GPU 1" in text and "5.9 GB for weights" in text  # 494M x (2 + 4 + 12 / 2) bytes
    cards = machine_facts.Gpus(visible=(_card(0, 15),))
    ((fatal, text),) = _told(list(preflight_ranks.check_gpu_memory(_plan(), cards)))
    assert not fatal and "20 GB for this model" in text


def test_the_least_memory_is_sharded_as_the_plan_says() -> None:
    one, parameters = preflight_ranks.model_state_bytes(_plan()), _plan().shape.num_parameters
    assert one == 18 * parameters
    assert preflight_ranks.model_state_bytes(_plan(devices=4)) == 9 * parameters
    assert preflight_ranks.model_state_bytes(_plan(devices=2, tensor_parallel=2)) == one / 2


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [(None, [0, 1, 2]), ("", []), ("0", [0]), ("2,0", [2, 0]), ("1,9,0", [1]), ("GPU-22ab", [2]), ("-1", [])],
)
def test_visible_cards_as_cuda_counts_them(chosen: str | None, indices: list[int]) -> None:
    every = (_card(0, 1), _card(1, 1), _card(2, 1))
    assert [card.index for card in machine_facts.visible_gpus(every, chosen)] == indices


def test_shared_memory_by_size_and_by_what_is_asked() -> None:
    def told(free: float, problem: str = "", **environ: str) -> list[bool]:
        shm = machine_facts.SharedMemory(int(free * 2**20), int(free * 2**20), problem)
        return [fatal for fatal, _ in _told(list(preflight_ranks.check_shared_memory(shm, environ)))]

    assert told(8192) == []
    assert told(64) == [False]
    assert told(0.0625) == [True] == told(8192, "Read-only file system")
    assert told(0.0625, NCCL_SHM_DISABLE="1") == [] == told(0.0625, CPT_PROCESS_GROUP_BACKEND="gloo")


def test_a_taken_port_is_refused_with_one_that_is_free() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        ((fatal, text),) = _told(list(preflight_ranks.check_port({"MASTER_PORT": str(taken)})))
        assert fatal and f"port {taken} is taken" in text and "MASTER_PORT=" in text
        assert list(preflight_ranks.check_port({"MASTER_PORT": str(taken), "RANK": "0"})) == []
    assert list(preflight_ranks.check_port({"MASTER_PORT": str(taken)})) == []
    assert list(preflight_ranks.check_port({})) == []
    assert _told(list(preflight_ranks.check_port({"MASTER_PORT": "99999"})))[0][0]


def test_a_hidden_second_gpu_is_told_with_the_set_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "query_gpus", lambda: machine_facts.Gpus(visible=(_card(0, 79),)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    findings = [one for one in preflight.check(_plan(devices=2), RunDir("x"), data=False) if one.fatal]
    assert ["--env dual" in str(one.problem) for one in findings] == [True]


@pytest.mark.parametrize(
    ("asked", "path", "found"),
    [
        ({"fp8": True}, "quack", []),
        (
            {"fp8": True, "fp8_lm_head": True},
            "fast",
            ["speed.fp8: no QuACK, or no Hopper GPU"],
        ),
        ({"fp8": True}, None, ["speed.fp8: a run on CPUs"]),
        ({"fp8_lm_head": True}, None, []),  # a CPU emulates it
        ({"fp8": True}, "sdpa", ["speed.fp8: no Transformer Engine"]),
        (
            {"fp8": True, "fp8_lm_head": True, "tensor_parallel": 2, "devices": 2},
            "quack",
            ["speed.fp8: tensor or pipeline parallelism", "speed.fp8_lm_head: tensor or pipeline parallelism"],
        ),
    ],
)
def test_fp8_is_refused_where_it_cannot_be_used(
    asked: dict[str, Any], path: memory.Path | None, found: list[str]
) -> None:
    plan = registry.resolve("qwen25_500m").plan
    problems = [one.problem for one in preflight_ranks.check_fp8(dataclasses.replace(plan, **asked), path)]
    assert [f"{one.what.removesuffix(' cannot be used')}: {one.found}" for one in problems] == found


def test_fp8_is_looked_at_where_the_run_trains(tmp_path: Path) -> None:
    plan = dataclasses.replace(registry.resolve("qwen25_tiny").plan, fp8=True)
    assert [one.problem.found for one in preflight_ranks.check_ranks(plan, RunDir("x", tmp_path))] == ["a run on CPUs"]
