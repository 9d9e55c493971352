"""The windows that a run really reads, over tiny Megatron corpora: by ranks, stages, resumes, budgets; and by document.

Each document repeats one number, which no other document has: the tokens of a sample say what was read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.continue_ledger import resume_ledger, start_ledger, with_layouts
from data.ledger import Corpus, Ledger, StageEntry, parse_ledger

pytestmark = pytest.mark.nemo

BATCH, SEQ, STEPS = 8, 16, 24
NUMBERS = {"a": 1000, "b": 2000, "r": 3000}  # of the first document of each corpus
TOKENS = {"a": 37 * SEQ + 5, "b": 11 * SEQ + 1, "r": 23 * SEQ}


def _write_corpora() -> list[Corpus]:
    """Documents of 1 to 40 tokens, in the current folder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    lengths, found = numpy.random.default_rng(0), []
    for name, tokens in TOKENS.items():
        Path(name).mkdir()
        builder = IndexedDatasetBuilder(f"{name}/train.bin", dtype=numpy.int32)
        number, left = NUMBERS[name], tokens
        while left:
            length = min(left, int(lengths.integers(1, 41)))
            builder.add_document(torch.full((length,), number, dtype=torch.int32), [length])
            number, left = number + 1, left - length
        builder.finalize(f"{name}/train.idx")
        role = "replay" if name == "r" else "new"
        found.append(Corpus(name, role, name, 4 * name, (tokens - 1) // SEQ))
    return found


@functools.cache
def _windows(corpus: Corpus, num_samples: int | None) -> Any:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from data.datasets import WholeMaskGPTDataset, build_windows
    from data.documents_read import _NoTokenizer

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQ,
        blend=([f"{corpus.folder}/train"], None),
        split="1,0,0",
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache="cache",
    )
    return build_windows(corpus, num_samples, WholeMaskGPTDataset, config)


def _stage(name: str, first: int, replay: float, new: str) -> StageEntry:
    within = {one: 1 / len(new) for one in new} | ({"r": 1.0} if replay else {})
    return StageEntry(name, first, replay, within)


def _fresh(corpora: list[Corpus], stages: list[StageEntry]) -> Ledger:
    return start_ledger(corpora, stages, seed=1, seq_length=SEQ, global_batch_size=BATCH)


shares = st.sampled_from([0.1, 0.25, 0.5])
plans = st.tuples(st.integers(1, STEPS - 1), shares, shares, st.sampled_from(["a", "b", "ab"]), st.booleans())
resumes = st.dictionaries(
    st.integers(1, STEPS - 1), st.sampled_from([(1, 1), (2, 4), (4, 2), (2, 2), (8, 1)]), max_size=3
)
decisions = st.lists(st.floats(0.02, 0.6), min_size=8, max_size=8)


def _train(
    corpora: list[Corpus], stages: list[StageEntry], budget: bool, decided: list[float], resumed: dict[int, Any]
) -> tuple[Ledger, list[list[tuple[int, int, int]]]]:
    """The ledger at the end, and the windows of each step, as the ranks of each attempt draw them.

    Args:
        budget: a decision every three steps, which takes effect at the next one.
        resumed: step -> data-parallel ranks and samples of a micro batch from there on.
    """
    from nemo.lightning.data import MegatronPretrainingSampler

    from data.ordered_dataset import OrderedDataset

    ledger, read = _fresh(corpora, stages), []
    if budget:
        from data.budget import BudgetState

        ledger = dataclasses.replace(ledger, budget=BudgetState({"r": 2.0}, stages[0].replay_share))
    ends = sorted([*resumed, STEPS])
    for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True), start=1):
        ranks, micro = resumed.get(start, (1, 4))
        if start:
            saved = parse_ledger(ledger.at(start).to_json())
            ledger = resume_ledger(saved, corpora, stages, attempt=number, has_budget=budget)
        dataset = OrderedDataset(ledger, _windows, STEPS * BATCH, most_changes=STEPS)
        samplers = [
            iter(MegatronPretrainingSampler(STEPS * BATCH, start * BATCH, micro, rank, ranks)) for rank in range(ranks)
        ]
        for step in range(start, end):
            drawn = [index for _ in range(BATCH // micro // ranks) for one in samplers for index in next(one)]
            assert sorted(drawn) == list(range(step * BATCH, (step + 1) * BATCH))
            dataset[drawn[0]]  # makes the changes that were decided
            read.append([dataset.rows_of_step(step)[index - step * BATCH] for index in sorted(drawn)])
            if budget and (step + 1) % 3 == 0:
                share = decided[(step + 1) // 3 - 1]
                dataset.change_share(share, step + 1, step + 1)
                state = BudgetState({"r": 2.0}, share, step + 1, step + 1, {"r": 0.5})
                ledger = dataclasses.replace(ledger.with_share(share, step + 1, step + 1), budget=state)
    return ledger.at(STEPS), read


def _check_any_run() -> None:
    corpora = _write_corpora()

    @given(plan=plans, decided=decisions, resumed=resumes)
    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None, database=None)
    def check(plan: Any, decided: list[float], resumed: dict[int, Any]) -> None:
        switch, first, second, new, budget = plan
        stages = [_stage("main", 0, first, "ab"), _stage("anneal", switch, second, new)]
        ledger, read = _train(corpora, stages, budget, decided, resumed)
        assert read == _train(corpora, stages, budget, decided, {})[1]
        _check_passes(corpora, [row for rows in read for row in rows])
        _check_shares(ledger, read)

    check()


def _check_passes(corpora: list[Corpus], rows: list[tuple[int, int, int]]) -> None:
    """Each pass of a corpus has every window once, before the next one begins."""
    for number, corpus in enumerate(corpora):
        own = [(one, window) for domain, one, window in rows if domain == number]
        for start in range(0, len(own), corpus.windows):
            reading = own[start : start + corpus.windows]
            assert {one for one, _ in reading} == {start // corpus.windows}
            assert len({window for _, window in reading}) == len(reading)


def _check_shares(ledger: Ledger, read: list[list[tuple[int, int, int]]]) -> None:
    """From a change of the shares to the next one they hold within one global batch."""
    segments = ledger.segments()
    ends = [*(segment.first for segment in segments[1:]), STEPS]
    for segment, end in zip(segments, ends, strict=True):
        drawn = collections.Counter(row[0] for rows in read[segment.first : end] for row in rows)
        for number, weight in enumerate(segment.weights):
            assert abs(drawn[number] - weight * (min(end, STEPS) - segment.first) * BATCH) < BATCH


def test_any_run_reads_each_window_once_in_exact_shares(forked: Callable[..., Any]) -> None:
    """Two stages, with and without a budget that moves the share, resumed at any steps with any number of ranks."""
    forked(_check_any_run)


def _count(ledger: Ledger, begun: Ledger, cut: int) -> Iterator[tuple[str, int, str, int]]:
    """(stage, attempt, corpus, document) of every token that was read, from the samples themselves."""
    from data.ordered_dataset import OrderedDataset

    for corpus in begun.corpora:
        for index in range(begun.read[corpus.name]):
            for token in _windows(corpus, corpus.laid_out)[index]["tokens"].tolist():
                yield "plain", 1, corpus.name, token - NUMBERS[corpus.name]
    dataset = OrderedDataset(ledger.at(begun.step), _windows, ledger.step * BATCH)
    for index in range(begun.step * BATCH, ledger.step * BATCH):
        step, sample = index // BATCH, dataset[index]
        name = ledger.corpora[sample["dataset_id"]].name
        for token in sample["tokens"].tolist():
            yield ledger.stage_at(step).name, 2 if step < cut else 3, name, token - NUMBERS[name]


def _check_documents() -> None:
    """Begun in Megatron's order, which lays out two epochs of `b`; another blend at 5, a resume at 9, a stage at 12."""
    from data.documents_read import count_documents

    corpora, cut, last = _write_corpora(), 9, 70
    begun = _fresh(corpora, [dataclasses.replace(_stage("plain", 0, 0.25, "ab"), order="megatron")])
    asked = {"a": 60, "b": 20, "r": 20}
    layouts = {one.name: (asked[one.name], len(_windows(one, asked[one.name]))) for one in corpora}
    begun = with_layouts(begun, layouts).at(5, {"a": 15, "b": 15, "r": 10})
    stages = [_stage("main", 0, 0.5, "ab"), _stage("anneal", 12, 0.1, "b")]
    ledger = resume_ledger(begun, corpora, stages, attempt=2, change_blend=True)
    ledger = resume_ledger(parse_ledger(ledger.at(cut).to_json()), corpora, stages, attempt=3).at(last)
    expected = collections.Counter(_count(ledger, begun, cut))
    found: collections.Counter[Any] = collections.Counter()
    for one in count_documents(ledger, Path("other-cache")):
        tokens = {number: count for number, count in enumerate(one.tokens.tolist()) if count}
        if one.attempt is not None:
            found.update({(one.stage, one.attempt, one.corpus, number): count for number, count in tokens.items()})
            continue
        whole: collections.Counter[int] = collections.Counter()
        for (_, _, corpus, number), count in expected.items():
            whole[number] += count if corpus == one.corpus else 0
        assert tokens == +whole and one.lengths.sum() == TOKENS[one.corpus]
        row = one.row()
        times = [whole[number] // length for number, length in enumerate(one.lengths.tolist())]
        assert (row["1x"], row["4x+"]) == (times.count(1), sum(count >= 4 for count in times))
        assert row["not read"] == sum(not whole[number] for number in range(len(times)))
        assert row["partly"] == times.count(0) - row["not read"] and row["documents"] == len(times)
    assert found == expected and len({key[:3] for key in found}) == 3 + 3 + 3 + 2


def test_the_documents_of_a_ledger_are_those_that_were_read(forked: Callable[..., Any]) -> None:
    forked(_check_documents)
