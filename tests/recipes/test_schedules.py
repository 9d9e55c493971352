"""Every schedule against its formula, written a second time here; goldens; profiles; the picture."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from recipes import profiles
from recipes.curve import plot
from recipes.schedules import KINDS, WSD, Infinite, Polish, RewarmCosine, Schedule, build

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "schedules"
CANONICAL: dict[str, Schedule] = {
    "rewarm_cosine": RewarmCosine(max_lr=2e-5, min_lr=2e-6, warmup_steps=10, decay_end=200),
    "polish": Polish(max_lr=3e-5, decay_end=200),
    "wsd_stable": WSD(max_lr=1e-4, warmup_steps=10),
    "wsd_sqrt": WSD(max_lr=1e-4, min_lr=1e-6, warmup_steps=10, fork_step=170, decay_steps=30),
    "wsd_linear": WSD(max_lr=1e-4, min_lr=1e-6, warmup_steps=10, fork_step=170, decay_steps=30, decay_shape="linear"),
    "infinite": Infinite(
        max_lr=1e-4, constant_lr=3e-5, min_lr=1e-6, warmup_steps=10, cooldown_steps=60, fork_step=150, decay_steps=40
    ),
}
peaks = st.floats(1e-7, 1e-2)
shares = st.floats(0.001, 1.0)
lengths = st.integers(1, 150)


def _close(found: float, formula: float, peak: float) -> None:
    assert abs(found - formula) <= 1e-7 * peak


def _ramp(step: int, warmup: int, start: float, peak: float) -> float:
    return start + (peak - start) * (step + 1) / (warmup + 1)


def _half_cosine(share: float, high: float, low: float) -> float:
    return (high + low) / 2 + (high - low) / 2 * math.cos(math.pi * share)


def _check_shape(schedule: Schedule, steps: int) -> None:
    """Within 0..peak, up in the warm-up, never up afterwards; no jump at a border; flat after the end."""
    lrs = [schedule.lr(step) for step in range(steps)]
    assert all(0 <= lr <= schedule.max_lr * (1 + 1e-12) for lr in lrs)
    top = schedule.warmup_steps
    slack = 1e-12 * schedule.max_lr
    assert all(later > before - slack for before, later in zip(lrs[:top], lrs[1 : top + 1], strict=True))
    assert all(later < before + slack for before, later in zip(lrs[top:-1], lrs[top + 1 :], strict=True))
    assert lrs[top] == pytest.approx(schedule.max_lr, rel=1e-12)
    found = schedule.phases()
    assert found[0].first == 0 and found[-1].end is None
    assert all(before.end == after.first for before, after in zip(found, found[1:]))  # noqa: B905
    if schedule.end is not None:
        assert schedule.lr(schedule.end) == pytest.approx(schedule.min_lr, rel=1e-12)  # type: ignore[attr-defined]
        assert schedule.lr(schedule.end + 1000) == schedule.lr(schedule.end)


@given(peak=peaks, low=shares, start=shares, warmup=st.integers(0, 40), length=lengths)
def test_rewarm_cosine(peak: float, low: float, start: float, warmup: int, length: int) -> None:
    schedule = RewarmCosine(
        max_lr=peak, min_lr=low * peak, start_lr=start * peak, warmup_steps=warmup, decay_end=warmup + length
    )
    for step in range(warmup + length + 20):
        formula = _half_cosine(min(1.0, (step - warmup) / length), peak, low * peak)
        _close(schedule.lr(step), formula if step >= warmup else _ramp(step, warmup, start * peak, peak), peak)
    _check_shape(schedule, warmup + length + 20)


@given(peak=peaks, length=lengths)
def test_polish(peak: float, length: int) -> None:
    schedule = Polish(max_lr=peak, decay_end=length)
    for step in range(length + 20):
        _close(schedule.lr(step), _half_cosine(min(1.0, step / length), peak, peak / 100), peak)
    assert schedule.lr(0) == peak
    _check_shape(schedule, length + 20)


@given(
    peak=peaks,
    low=shares,
    warmup=st.integers(0, 40),
    stable=st.integers(0, 100),
    length=lengths,
    shape=st.sampled_from(("linear", "1-sqrt")),
)
def test_wsd(peak: float, low: float, warmup: int, stable: int, length: int, shape: str) -> None:
    whole = WSD(max_lr=peak, min_lr=low * peak, warmup_steps=warmup, decay_shape=shape)
    fork = warmup + stable
    forked = whole.fork(fork, length)
    for step in range(fork + length + 20):
        done = max(0.0, min(1.0, (step - fork) / length))
        left = 1 - done if shape == "linear" else 1 - done**0.5
        formula = low * peak + (peak - low * peak) * left
        _close(forked.lr(step), formula if step >= warmup else _ramp(step, warmup, 0, peak), peak)
        assert step > fork or forked.lr(step) == whole.lr(step)  # a fork leaves the past, and its own step, alone
    _check_shape(forked, fork + length + 20)
    assert whole.end is None and whole.lr(10**9) == peak


@given(
    peak=peaks,
    mid=shares,
    low=shares,
    warmup=st.integers(0, 40),
    cooldown=lengths,
    constant=st.integers(0, 100),
    length=lengths,
)
def test_infinite(peak: float, mid: float, low: float, warmup: int, cooldown: int, constant: int, length: int) -> None:
    level, least, fork = mid * peak, low * mid * peak, warmup + cooldown + constant
    whole = Infinite(max_lr=peak, constant_lr=level, min_lr=least, warmup_steps=warmup, cooldown_steps=cooldown)
    forked = whole.fork(fork, length)
    for step in range(fork + length + 20):
        if step < warmup:
            formula = _ramp(step, warmup, 0, peak)
        elif step < warmup + cooldown:
            formula = _half_cosine((step - warmup) / cooldown, peak, level)
        else:
            formula = level * (least / level) ** max(0.0, min(1.0, (step - fork) / length))
        _close(forked.lr(step), formula, peak)
        assert step > fork or forked.lr(step) == whole.lr(step)
    _check_shape(forked, fork + length + 20)
    assert whole.end is None and whole.lr(10**9) == level


def _largest_jump(schedule: Schedule) -> float:
    return max(abs(schedule.lr(step + 1) - schedule.lr(step)) for step in range(2 * 10**4))


@pytest.mark.parametrize("scale", (1, 10))
def test_no_jump_at_a_border(scale: int) -> None:
    """Ten times the steps, a tenth of the largest step between neighbours (1-sqrt: its root)."""
    curves = [
        RewarmCosine(max_lr=1, min_lr=0.1, warmup_steps=100 * scale, decay_end=1500 * scale),
        Polish(max_lr=1, decay_end=1500 * scale),
        Infinite(max_lr=1, constant_lr=0.3, min_lr=0.01, warmup_steps=100 * scale, cooldown_steps=500 * scale).fork(
            1000 * scale, 500 * scale
        ),
        WSD(max_lr=1, warmup_steps=100 * scale, decay_shape="linear").fork(1000 * scale, 500 * scale),
    ]
    assert all(_largest_jump(curve) < 0.0105 / scale for curve in curves)
    assert _largest_jump(WSD(max_lr=1, warmup_steps=100 * scale).fork(1000 * scale, 500 * scale)) < 0.05 / scale**0.5


@pytest.mark.parametrize("name", CANONICAL)
def test_golden(name: str) -> None:
    """Changed on purpose? `UPDATE_GOLDENS=1 pytest tests/recipes/test_schedules.py` writes them anew."""
    path = GOLDENS / f"{name}.json"
    found = {str(step): CANONICAL[name].lr(step) for step in range(0, 211)}
    if os.environ.get("UPDATE_GOLDENS"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schedule": repr(CANONICAL[name]), "lr": found}, indent=0) + "\n")
    golden = json.loads(path.read_text())
    assert golden["schedule"] == repr(CANONICAL[name])
    assert found == pytest.approx(golden["lr"], rel=1e-12)


COSINE = {"max_lr": 1e-4, "min_lr": 1e-5, "decay_end": 100}
ENDLESS = {"max_lr": 1e-4, "min_lr": 1e-6, "constant_lr": 3e-5, "cooldown_steps": 50}


@pytest.mark.parametrize(
    ("kind", "wrong", "word"),
    (
        ("rewarm_cosine", {**COSINE, "min_lr": 2e-4}, "min_lr"),
        ("rewarm_cosine", {**COSINE, "max_lr": 0.0, "min_lr": 0.0}, "max_lr"),
        ("rewarm_cosine", {**COSINE, "max_lr": "high"}, "max_lr"),
        ("rewarm_cosine", {**COSINE, "max_lr": math.nan}, "max_lr"),
        ("rewarm_cosine", {**COSINE, "warmup_steps": 100}, "decay_end"),
        ("rewarm_cosine", {**COSINE, "warmup_steps": -1}, "warmup_steps"),
        ("rewarm_cosine", {**COSINE, "decay_end": 10.5}, "decay_end"),
        ("rewarm_cosine", {"max_lr": 1e-4, "min_lr": 1e-5}, "a value for decay_end"),
        ("rewarm_cosine", {**COSINE, "fork_step": 3}, "fork_step=None"),
        ("polish", {"max_lr": 1e-4, "decay_end": 0}, "decay_end"),
        ("polish", {"max_lr": 1e-4, "decay_end": 9, "warmup_steps": 1}, "polish has no warm-up"),
        ("wsd", {"max_lr": 1e-4, "fork_step": 5}, "together with fork_step"),
        ("wsd", {"max_lr": 1e-4, "warmup_steps": 9, "fork_step": 5, "decay_steps": 5}, "fork_step"),
        ("wsd", {"max_lr": 1e-4, "decay_shape": "square"}, "1-sqrt"),
        ("wsd", {"max_lr": 1e-4, "fork_step": 5, "decay_steps": 0}, "decay_steps"),
        ("infinite", {**ENDLESS, "min_lr": 0.0}, "min_lr"),
        ("infinite", {**ENDLESS, "constant_lr": "low"}, "constant_lr"),
        ("infinite", {**ENDLESS, "fork_step": 20, "decay_steps": 5}, "at least 50"),
        ("cosine", {}, "rewarm_cosine"),
    ),
)
def test_wrong_parameters(kind: str, wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError) as error:
        build(kind, **wrong)
    assert word in str(error.value)
    assert error.value.expected and error.value.found and error.value.do


def test_none_is_not_given() -> None:
    assert build("wsd", max_lr=1e-4, constant_lr=None, fork_step=None) == WSD(max_lr=1e-4)
    assert set(KINDS) == {"rewarm_cosine", "polish", "wsd", "infinite"}
    with pytest.raises(ValueError, match="before the first"):
        WSD(max_lr=1).lr(-1)


def test_warnings() -> None:
    schedule = RewarmCosine(max_lr=1e-4, min_lr=1e-5, warmup_steps=10, decay_end=100)
    assert schedule.warnings(100) == [] == WSD(max_lr=1).warnings(7)
    assert "last lr is" in schedule.warnings(50)[0]
    assert "warm-up of 10 steps is not over" in schedule.warnings(10)[0]
    assert "100 to 200 stay flat" in schedule.warnings(200)[0]


@pytest.mark.parametrize("name", profiles.PROFILES)
@given(max_steps=st.integers(10, 20000))
@settings(max_examples=50)
def test_profiles(name: str, max_steps: int) -> None:
    """Every profile is whole at any length: it ends with the run, without a warning, and says why."""
    chosen, schedule = profiles.profile(name), profiles.schedule(name, max_steps)
    assert schedule.end == max_steps and schedule.warnings(max_steps) == []
    assert schedule.lr(schedule.warmup_steps) == chosen.max_lr
    assert schedule.lr(max_steps) == pytest.approx(chosen.max_lr / chosen.fall)
    lines = "\n".join(profiles.reasons(name, schedule, max_steps))
    assert "arXiv" in lines and "replay" in lines and f"{chosen.max_lr:g}" in lines


def test_profile_errors() -> None:
    with pytest.raises(UserError, match="did you mean --profile gentle"):
        profiles.profile("gentel")
    with pytest.raises(UserError, match="at least 10 steps"):
        profiles.schedule("wsd", 3)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("rewarm_cosine", 1), ("polish", 200), ("wsd_stable", 200), ("wsd_sqrt", 200), ("infinite", 200)],
)
def test_picture(name: str, steps: int, tmp_path: Path) -> None:
    """Every kind; a phase without an end, a fork, a run of one step."""
    plot(CANONICAL[name], steps, tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")


def test_light() -> None:
    """Neither torch nor NeMo for the formulas and the reasons."""
    code = (
        "import sys; from recipes import profiles, curve; profiles.reasons('wsd', profiles.schedule('wsd', 100), 100);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'nemo', 'nemo_run', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=GOLDENS.parents[2]).returncode == 0
