"""The forgetting budget: its controller, and the ledger of a run whose replay share it moves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.budget import AIM, Budget, BudgetState
from data.continue_ledger import resume_ledger
from data.ledger import Ledger, parse_ledger
from data.sample_order import samples_of_steps
from tests.data.test_ledger import BATCH, CORPORA, _check_read_once, _fresh, _stage

BUDGET = Budget({"r": 0.1, "w": 0.2}, low=0.02, high=0.6)


def test_the_share_follows_the_most_used_budget() -> None:
    used = BUDGET.used({"r": 2.05, "w": 3.3}, {"r": 2.0, "w": 3.0})
    assert used == pytest.approx({"r": 0.5, "w": 1.5})
    assert BUDGET.next_share(0.2, used, used) > 0.2
    assert BUDGET.next_share(0.2, {"r": 0.5, "w": AIM}, {"r": 0.5, "w": AIM}) == pytest.approx(0.2)
    nan = float("nan")
    for diverged in ({"r": nan}, {"r": nan, "w": 3.0}, {"r": 3.0, "w": nan}):
        assert BUDGET.next_share(0.2, diverged, {"r": 0.5, "w": 0.5}) == 0.2
    assert BUDGET.next_share(0.2, {"r": -1.0, "w": 0.3}, {"r": -1.0, "w": 0.3}) < 0.2


def test_it_sees_a_rise_before_the_budget_is_used() -> None:
    """The same loss, reached from below and from above."""
    used = {"r": 0.7}
    assert BUDGET.next_share(0.2, used, {"r": 0.5}) > 0.2 > BUDGET.next_share(0.2, used, {"r": 0.9})


def test_a_budget_that_is_given_later_starts_from_what_is_used_then() -> None:
    """After --change-blend, half a budget that is used already is no sudden rise from 0."""
    assert BUDGET.next_share(0.2, {"r": 0.5}, {}) == BUDGET.next_share(0.2, {"r": 0.5}, {"r": 0.5}) < 0.2


@given(share=st.floats(0.02, 0.6), used=st.floats(-50, 50), before=st.floats(-50, 50))
@settings(deadline=None)
def test_the_share_stays_within_its_bounds_and_moves_by_one_step_at_most(
    share: float, used: float, before: float
) -> None:
    found = BUDGET.next_share(share, {"r": used}, {"r": before})
    odds = (found / (1 - found)) / (share / (1 - share))
    assert BUDGET.low <= found <= BUDGET.high and 1 / 2.7183 < odds < 2.7183


def _decide(ledger: Ledger, step: int, ahead: int, share: float) -> Ledger:
    """What data/module.py does with a decision."""
    state = BudgetState({"r": 2.0}, share, step + ahead, step, {"r": 0.5})
    return dataclasses.replace(ledger.with_share(share, state.first, step), budget=state)


decisions = st.lists(st.floats(0.02, 0.6), min_size=8, max_size=8)


@given(shares=decisions, ahead=st.integers(0, 2), stop=st.integers(1, 23), seam=st.integers(1, 23))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_a_resume_reads_what_an_uninterrupted_run_reads(shares: Any, ahead: int, stop: int, seam: int) -> None:
    """Two stages and a decision every three steps; the run is resumed at `stop` and the stages change at `seam`."""
    stages = [_stage(0, 0.1), _stage(seam, 0.1, a=1.0, r=1.0)]
    straight = resumed = dataclasses.replace(_fresh(*stages), budget=BudgetState({"r": 2.0}, 0.1))
    for step in range(1, 24):
        if step % 3 == 0:
            straight = _decide(straight, step, ahead, shares[step // 3])
            resumed = _decide(resumed, step, ahead, shares[step // 3])
        if step == stop:
            saved = parse_ledger(resumed.at(step).to_json())
            assert saved == resumed.at(step)
            resumed = resume_ledger(saved, CORPORA, stages, attempt=2, has_budget=True)
    assert resumed.segments() == straight.segments()
    _check_read_once(resumed.at(23))
    for step in (5, 11, 22):
        share = straight.stage_at(step).replay_share
        domains, _ = samples_of_steps(straight.segments(), step, BATCH)
        assert abs((domains == 2).sum() - share * BATCH) < 2.5


def test_a_budget_is_not_given_or_taken_by_accident() -> None:
    stages = [_stage(0, 0.1)]
    ledger = _decide(_fresh(*stages), 3, 0, 0.3).at(4)
    with pytest.raises(UserError, match="another blend") as error:
        resume_ledger(ledger, CORPORA, stages, attempt=2)
    assert error.value.found == "no forgetting budget from here on"
    with pytest.raises(UserError, match="another blend"):
        resume_ledger(_fresh(*stages).at(4), CORPORA, stages, attempt=2, has_budget=True)
    fixed = resume_ledger(ledger, CORPORA, stages, attempt=2, change_blend=True)
    assert fixed.budget is None and fixed.stage_at(4).replay_share == 0.1
