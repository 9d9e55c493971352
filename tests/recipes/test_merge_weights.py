"""The weights of a merge are those with which it equals the oldest checkpoint plus decayed updates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from recipes.merge_weights import ONE_SQRT, SHAPES, UNIFORM, merge_weights
from recipes.schedules import WSD

STEPS = st.lists(st.integers(0, 400), min_size=2, max_size=9, unique=True).map(sorted)


@given(STEPS, st.sampled_from(SHAPES))
@settings(deadline=None)
def test_they_are_shares(steps: list[int], shape: str) -> None:
    weights = merge_weights(steps, shape)
    assert len(weights) == len(steps) and min(weights) >= 0 and sum(weights) == pytest.approx(1)


@given(STEPS)
@settings(deadline=None)
def test_a_merge_is_a_decay_of_the_updates(steps: list[int]) -> None:
    """With one update per step, and the learning rates of the schedule `wsd` that decays over these steps to 0."""
    first, last = steps[0], steps[-1]
    schedule = WSD(max_lr=1.0, min_lr=0.0, fork_step=first, decay_steps=last - first)
    positions = [first + sum(range(steps[0], step)) for step in steps]  # update s moves the model by s
    merged = sum(w * x for w, x in zip(merge_weights(steps, ONE_SQRT), positions, strict=True))
    decayed = float(positions[0])
    for start, end in itertools.pairwise(steps):
        mean_decay = sum(schedule.lr(step) for step in range(start, end)) / (end - start)
        decayed += mean_decay * sum(range(start, end))
    assert merged == pytest.approx(decayed)


def test_uniform_weights_are_a_linear_decay() -> None:
    weights = merge_weights([100, 200, 300, 400], UNIFORM)
    assert [sum(weights[i:]) for i in range(1, 4)] == pytest.approx([0.75, 0.5, 0.25])


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(UserError, match="unknown shape") as error:
        merge_weights([1, 2], "sqrt")
    assert "--shape 1-sqrt" in error.value.do
