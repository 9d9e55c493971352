"""The token ledger: whatever a run goes through, no sample is read twice in a pass and none is left out of it."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.continue_ledger import resume_ledger, start_ledger, with_layouts
from data.ledger import Corpus, Ledger, StageEntry, parse_ledger

BATCH, SEQ = 8, 16
WINDOWS = {"a": 37, "b": 11, "r": 23}
CORPORA = [Corpus(name, "replay" if name == "r" else "new", name, 4 * name, WINDOWS[name]) for name in WINDOWS]


def _stage(first: int, replay: float, **within: float) -> StageEntry:
    return StageEntry(f"from-{first}", first, replay, within or {"a": 0.5, "b": 0.5, "r": 1.0})


def _fresh(*stages: StageEntry) -> Ledger:
    return start_ledger(CORPORA, stages, seed=1, seq_length=SEQ, global_batch_size=BATCH)


def _check_read_once(ledger: Ledger) -> None:
    """Every pass of a corpus is read from its first window on, without a gap, before the next one begins."""
    at: dict[str, tuple[int, int]] = {}
    by_name = {corpus.name: corpus for corpus in ledger.corpora}
    for one in ledger.ranges():
        corpus, (number, place) = by_name[one.corpus], at.get(one.corpus, (0, 0))
        if place == corpus.size_of(number):
            number, place = number + 1, 0
        assert (one.first_pass, one.first) == (number, place)
        between = sum(map(corpus.size_of, range(one.first_pass, one.last_pass)))
        assert one.samples == between + one.end - one.first and 0 < one.end <= corpus.size_of(one.last_pass)
        at[one.corpus] = (one.last_pass, one.end)
    read = {name: sum(r.samples for r in ledger.ranges() if r.corpus == name) for name in by_name}
    assert read == {name: ledger.read.get(name, 0) for name in by_name}
    assert sum(read.values()) == ledger.step * BATCH


shares = st.sampled_from([0.0, 0.1, 0.25, 0.5])
plans = st.lists(st.tuples(st.integers(1, 9), shares, st.sampled_from(["a", "b", "ab"])), min_size=1, max_size=4)


def _stages(plan: list[tuple[int, float, str]]) -> list[StageEntry]:
    found, first = [], 0
    for length, share, new in plan:
        within = {name: 1 / len(new) for name in new} | ({"r": 1.0} if share else {})
        found.append(_stage(first, share, **within))
        first += length
    return found


@given(plan=plans, stops=st.lists(st.integers(1, 12), max_size=3), changed=plans, seed=st.integers(0, 3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_nothing_is_read_twice(plan: Any, stops: list[int], changed: Any, seed: int) -> None:
    """Stages, resumes and then another blend, whose shares hold within one global batch from there on."""
    stages, step = _stages(plan), 0
    straight = _fresh(*stages)
    ledger = straight
    for attempt, stop in enumerate(stops, start=2):
        step += stop
        ledger = resume_ledger(parse_ledger(ledger.at(step).to_json()), CORPORA, stages, attempt=attempt)
        assert ledger.segments() == straight.segments()
        _check_read_once(ledger)
    step += 3
    other = resume_ledger(ledger.at(step), CORPORA, _stages(changed), attempt=9, change_blend=True)
    for last in (step + 1, step + 17):
        _check_read_once(other.at(last))
    now = other.stage_at(step)
    first_next = min((one.first for one in other.stages if one.first > step), default=step + 5)
    before, after = other.counts_at(step), other.counts_at(first_next)
    for name, share in now.within.items():
        part = share * (now.replay_share if name == "r" else 1 - now.replay_share)
        assert abs(after[name] - before[name] - part * (first_next - step) * BATCH) < BATCH


def test_another_blend_must_be_meant() -> None:
    ledger = _fresh(_stage(0, 0.25), _stage(10, 0.5)).at(12)
    with pytest.raises(UserError, match="trained on another blend") as error:
        resume_ledger(ledger, CORPORA, [_stage(0, 0.25), _stage(9, 0.5)], attempt=2)
    assert "from step 9" in error.value.found and "--change-blend" in error.value.do
    with pytest.raises(UserError, match="another blend") as error:
        resume_ledger(ledger, CORPORA, [_stage(0, 0.1), _stage(10, 0.5)], attempt=2)
    assert "replay share 0.1" in error.value.found
    longer = resume_ledger(ledger, CORPORA, [_stage(0, 0.25), _stage(10, 0.5), _stage(20, 0.1)], attempt=2)
    assert [stage.first for stage in longer.stages] == [0, 10, 20]  # only what is ahead is another
    assert [(one.number, one.first) for one in longer.attempts] == [(1, 0), (2, 12)]


def test_a_change_is_recorded_and_stays() -> None:
    ledger = _fresh(_stage(0, 0.25)).at(12)
    changed = resume_ledger(ledger, CORPORA, [_stage(0, 0.5)], attempt=2, change_blend=True)
    assert changed.stages[1].change == "--change-blend at step 12 of attempt 2" and changed.stages[1].first == 12
    again = resume_ledger(parse_ledger(changed.at(15).to_json()), CORPORA, [_stage(0, 0.5)], attempt=3)
    assert again.segments() == changed.segments()
    _check_read_once(again.at(30))
    rows = [(one.stage, one.attempt) for one in again.at(30).ranges()]
    assert rows == sorted(rows, key=lambda row: row[1]) and {row[1] for row in rows} == {1, 2, 3}


def test_a_fork_counts_its_attempts_after_those_of_the_first_run() -> None:
    """A fork's own attempts begin with 1; in the ledger no two attempts have one number."""
    stages = [_stage(0, 0.25)]
    second = resume_ledger(_fresh(*stages).at(4), CORPORA, stages, attempt=2).at(8)
    for attempt, expected in ((1, 3), (2, 3), (7, 7)):  # the first of a fork, its retry, the seventh of the run itself
        forked = resume_ledger(
            parse_ledger(second.to_json()), CORPORA, [_stage(0, 0.5)], attempt=attempt, change_blend=True
        )
        assert [one.number for one in forked.attempts] == [1, 2, expected] and forked.stage_at(8).attempt == expected
        assert forked.stages[-1].change == f"--change-blend at step 8 of attempt {expected}"
        assert {one.attempt for one in forked.at(10).ranges()} == {1, 2, expected}


def test_a_run_in_megatrons_order_goes_on_in_what_it_has_laid_out() -> None:
    """The first pass is what Megatron laid out (two epochs here); the corpus is read again only after it."""
    plain = [dataclasses.replace(_stage(0, 0.25), order="megatron")]
    ledger = with_layouts(_fresh(*plain), {"a": (60, 74), "b": (60, 22), "r": (20, 23)})
    ledger = ledger.at(5, {"a": 15, "b": 15, "r": 10})
    assert ledger.order == "megatron" and resume_ledger(ledger, CORPORA, plain, attempt=2).order == "megatron"
    with pytest.raises(UserError, match="another blend"):
        resume_ledger(ledger, CORPORA, [_stage(0, 0.25)], attempt=2)
    changed = resume_ledger(ledger, CORPORA, [_stage(0, 0.5)], attempt=2, change_blend=True)
    _check_read_once(changed.at(5))
    _check_read_once(changed.at(40))
    b = changed.corpora[1]
    assert [b.locate(n) for n in (21, 22, 33)] == [(0, 21), (1, 0), (2, 0)]


def test_a_corpus_is_known_by_name_and_content() -> None:
    ledger = _fresh(_stage(0, 0.25)).at(4)
    other = dataclasses.replace(CORPORA[0], content="other")
    with pytest.raises(UserError, match="a is another corpus than it was"):
        resume_ledger(ledger, [other, *CORPORA[1:]], ledger.stages, attempt=2)
    renamed = dataclasses.replace(CORPORA[0], name="c")
    with pytest.raises(UserError, match="that this run knows as a"):
        resume_ledger(ledger, [renamed, *CORPORA[1:]], ledger.stages, attempt=2)
    new = Corpus("c", "new", "c", "content", 50)
    stages = [_stage(0, 0.25, c=1.0, r=1.0)]
    changed = resume_ledger(ledger, [new, CORPORA[2]], stages, attempt=2, change_blend=True)
    assert [corpus.name for corpus in changed.corpora] == ["a", "b", "r", "c"]
    assert changed.counts_at(8)["c"] == 24 and changed.counts_at(8)["a"] == ledger.read["a"]


def test_a_key_for_each_pass_and_corpus() -> None:
    ledger = _fresh(_stage(0, 0.25))
    keys = {ledger.key(corpus, number) for corpus in CORPORA for number in range(5)}
    keys |= {dataclasses.replace(ledger, seed=2).key(CORPORA[0], 0)}
    assert len(keys) == 16 and all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("damage", ["", "{}", '{"version": 2}', "[1]"])
def test_what_is_no_ledger_is_refused(damage: str, tmp_path: Any) -> None:
    from data.ledger import read_ledger

    (tmp_path / "ledger.json").write_text(damage)
    for path in (tmp_path / "ledger.json", tmp_path / "none.json"):
        with pytest.raises(UserError, match="does not say what the run has read"):
            read_ledger(path)


def test_counts_do_not_depend_on_the_length() -> None:
    """A ledger of a billion steps answers at once."""
    ledger = _fresh(_stage(0, 0.25), _stage(10**9, 0.5)).at(10**9 + 5)
    assert math.isclose(ledger.read["r"], 0.25 * BATCH * 10**9, rel_tol=1e-6) and len(ledger.ranges()) > 3


def test_two_stages_of_one_name_stay_apart() -> None:
    """A plain run and its changed blend are both called `all`; the report must not mix them up."""
    from pathlib import Path

    from common.rundir import RunDir
    from report.ledger import stage_rows
    from report.read import RunFiles

    plain = [StageEntry("all", 0, 0.25, {"a": 0.5, "b": 0.5, "r": 1.0}, order="megatron")]
    ledger = with_layouts(_fresh(*plain), {"a": (60, 74), "b": (60, 22), "r": (20, 23)})
    ledger = ledger.at(5, {"a": 15, "b": 15, "r": 10})
    now = [StageEntry("all", 0, 0.5, {"a": 1.0, "r": 1.0})]
    changed = resume_ledger(ledger, CORPORA, now, attempt=2, change_blend=True).at(9)
    files = RunFiles(RunDir("run", Path("runs")), records={"ledger.json": json.loads(changed.to_json())})
    rows = [(row.first, row.attempt, row.domain, row.share, bool(row.change)) for row in stage_rows(files)]
    assert rows[:3] == [(0, 1, "a", 0.375, False), (0, 1, "b", 0.375, False), (0, 1, "r", 0.25, False)]
    assert rows[3:] == [(5, 2, "a", 0.5, True), (5, 2, "r", 0.5, True)]
