"""The order of a run with stages: exact shares, no sample twice, permutations that miss none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.sample_order import Segment, count_in_order, lay_out, permute, permute_range, samples_of_steps

weights = st.lists(st.floats(1e-4, 1e4) | st.just(0.0), min_size=1, max_size=8).filter(any)


@given(weights=weights, n=st.integers(0, 10**12))
@settings(deadline=None)
def test_shares_are_exact_at_any_sample(weights: list[float], n: int) -> None:
    """Within 1/2 + m w / 2 samples of the exact share, which is less than a global batch of m samples."""
    counts, total = count_in_order(weights, n), math.fsum(weights)
    read = sum(weight > 0 for weight in weights)
    assert sum(counts) == n
    for weight, count in zip(weights, counts, strict=True):
        slack = 0.5 + read * weight / total / 2 + n * 1e-12
        assert abs(count - n * weight / total) <= slack and (weight or not count)


@given(weights=weights, first=st.integers(0, 10**9), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_however_it_is_cut_the_order_is_one(weights: list[float], first: int, sizes: list[int]) -> None:
    """Batches of any sizes, laid end to end, are the same samples: none twice, none left out."""
    end, parts, at = first + sum(sizes), [], first
    for size in sizes:
        parts.append(np.stack(lay_out(weights, at, at + size)))
        at += size
    assert np.array_equal(np.concatenate(parts, axis=1), np.stack(lay_out(weights, first, end)))
    domains, numbers = lay_out(weights, first, end)
    before = count_in_order(weights, first)
    for domain in range(len(weights)):
        own = numbers[domains == domain]
        assert np.array_equal(own, np.arange(before[domain], before[domain] + len(own)))


@given(size=st.integers(1, 9000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_a_permutation_misses_nothing(size: int, key: int) -> None:
    found = permute(np.arange(size, dtype=np.uint64), size, key)
    assert np.array_equal(np.sort(found), np.arange(size))
    middle = size // 2
    assert np.array_equal(permute_range(middle, size, size, key), found[middle:])


def test_permutations_mix_and_differ() -> None:
    """Neighbours do not stay together, and each key is another order."""
    first, second = (permute_range(0, 5000, 5000, key) for key in (1, 2))
    assert (np.abs(np.diff(first)) == 1).mean() < 0.01 and (first == second).mean() < 0.01
    assert abs(np.corrcoef(np.arange(5000), first)[0, 1]) < 0.05


def test_a_segment_goes_on_where_the_one_before_ended() -> None:
    first = Segment(0, (0.75, 0.25), (0, 0))
    second = Segment(10, (0.0, 1.0), first.counts_at(10, 8))
    domains, numbers = samples_of_steps((first, second), 10, 8)
    assert domains.tolist() == [1] * 8 and numbers.tolist() == list(range(20, 28))
    domains, numbers = samples_of_steps((first, second), 9, 8)
    assert numbers[domains == 1].tolist() == [18, 19] and max(numbers) == 59
    assert [len(samples_of_steps((first, second), step, 8, most=4)[0]) for step in (3, 8, 10)] == [32, 16, 32]


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, 0.2, 0.1), (1 / 3, 1 / 3, 1 / 3), (0.0, 1.0)])
def test_steps_that_are_laid_out_together_are_those_laid_out_alone(weights: tuple[float, ...]) -> None:
    segments = (Segment(0, weights, (0,) * len(weights)),)
    together = samples_of_steps(segments, 5, 24, most=40)
    alone = [samples_of_steps(segments, step, 24) for step in range(5, 45)]
    for part in (0, 1):
        assert together[part].tolist() == [one for step in alone for one in step[part].tolist()]


@pytest.mark.parametrize("step", [0, 7, 12_345])
def test_any_number_of_ranks_reads_the_same_batch(step: int) -> None:
    """Megatron's sampler cuts a global batch by numbers: each of them names one sample, whichever rank reads it."""
    segments = (Segment(0, (0.7, 0.2, 0.1), (0, 0, 0)),)
    whole = list(zip(*(part.tolist() for part in samples_of_steps(segments, step, 24)), strict=True))
    for ranks in (1, 2, 4, 8):
        micro = 3
        read = []
        for start in range(0, 24, micro * ranks):
            for rank in range(ranks):
                domains, numbers = samples_of_steps(segments, step, 24)
                own = slice(start + rank * micro, start + (rank + 1) * micro)
                read += list(zip(domains[own].tolist(), numbers[own].tolist(), strict=True))
        assert sorted(read) == sorted(whole) and len(set(read)) == 24
