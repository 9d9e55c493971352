"""What of a forgetting budget is refused before NeMo is imported."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from common.errors import UserError
from data.blend import Blend
from recipes import overrides, registry
from recipes.forgetting import check_budget
from recipes.plan import Plan
from recipes.stages import first_replay_share

DOMAINS = [
    {"name": "code", "folder": "c", "role": "new"},
    {"name": "prose", "folder": "p", "role": "replay"},
    {"name": "news", "folder": "n", "role": "watch"},
]
BLEND: dict[str, Any] = {"domains": DOMAINS, "replay_share": 0.25}


def _plan(*words: str, **numbers: Any) -> Plan:
    plan = overrides.apply_to_plan(registry.resolve("qwen25_tiny_cpt").plan, overrides.parse(words))
    return dataclasses.replace(plan, blend=BLEND, **numbers)


def test_a_budget_of_replayed_and_watched_domains() -> None:
    plan = _plan("forgetting_budget={'prose': 0.03, 'news': 0.1}", "replay_bounds=[0.3, 0.5]")
    assert plan.forgetting_budget == {"prose": 0.03, "news": 0.1}
    check_budget(plan, Blend(**BLEND))
    assert first_replay_share(plan) == 0.3 and first_replay_share(_plan()) is None


@pytest.mark.parametrize(
    ("numbers", "blend", "message"),
    [
        ({"forgetting_budget": {"porse": 0.1}}, {}, "did you mean prose"),
        ({"forgetting_budget": {"code": 0.1}}, {}, "leave code out"),
        ({"forgetting_budget": {"prose": 0.0}}, {}, "each above 0"),
        ({"forgetting_budget": {}}, {}, "out of range"),
        ({"forgetting_budget": {"prose": 0.1}, "replay_bounds": [0.0, 0.5]}, {}, "0 < lower < upper < 1"),
        ({"replay_bounds": [0.1, 0.5]}, {}, "bounds without a budget"),
        ({"forgetting_budget": {"prose": 0.1}, "val_check_interval": 200}, {}, "without a validation"),
        ({"forgetting_budget": {"prose": 0.1}, "limit_val_batches": 0}, {}, "limit_val_batches=4"),
        (
            {"forgetting_budget": {"news": 0.1}},
            {"domains": [DOMAINS[0], DOMAINS[2]], "replay_share": 0},
            "no replay share",
        ),
        (
            {"forgetting_budget": {"prose": 0.1}},
            {"stages": [{"name": "a", "until": "50%"}, {"name": "b", "replay_share": 0.5}]},
            "replay_share in stage b",
        ),
    ],
)
def test_what_is_refused(numbers: dict[str, Any], blend: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_budget(_plan(**numbers), Blend(**{**BLEND, **blend}))
    assert message in error.value.explain()


def test_a_budget_needs_a_blend() -> None:
    with pytest.raises(UserError, match="without a blend"):
        check_budget(_plan(forgetting_budget={"prose": 0.1}), None)
