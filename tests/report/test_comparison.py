"""Paired differences against numpy and known values; what is called better or worse."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from report.evaluation.comparison import decide, make_row

RNG = random.Random(1)
BASE = [RNG.random() for _ in range(200)]
BETTER = [value + 0.05 + RNG.gauss(0, 0.02) for value in BASE]


def test_a_mean_has_the_standard_error_of_its_differences() -> None:
    """It is far smaller than the error of either score: what makes an item hard is in both."""
    row = make_row("task", "acc", True, BETTER, BASE)
    differences = [a - b for a, b in zip(BETTER, BASE, strict=True)]
    assert row.value == pytest.approx(statistics.mean(BETTER)) and row.base == pytest.approx(statistics.mean(BASE))
    assert row.difference == pytest.approx(statistics.mean(differences))
    assert row.paired_error == pytest.approx(statistics.stdev(differences) / math.sqrt(200))
    assert row.standard_error == pytest.approx(statistics.stdev(BETTER) / math.sqrt(200))
    assert row.paired_error is not None and row.standard_error is not None
    assert row.paired_error < row.standard_error / 5


def test_bits_per_byte_is_a_ratio_of_sums_with_the_error_of_a_ratio() -> None:
    """Against the spread of the ratio in 2,000 samples with replacement."""
    rng = random.Random(2)
    weights = [rng.randint(500, 2000) for _ in range(100)]
    base = [(-w * (1.0 + rng.gauss(0, 0.1)), float(w)) for w in weights]
    model = [(ll * (0.95 + rng.gauss(0, 0.02)), w) for ll, w in base]
    row = make_row("task", "bits_per_byte", False, model, base)
    bits = math.log(2) * sum(weights)
    assert row.value == pytest.approx(-sum(ll for ll, _ in model) / bits)
    assert row.difference == pytest.approx(row.value - -sum(ll for ll, _ in base) / bits)
    spread = []
    for _ in range(2000):
        drawn = rng.choices(range(100), k=100)
        total = math.log(2) * sum(weights[i] for i in drawn)
        spread.append(sum(base[i][0] - model[i][0] for i in drawn) / total)
    assert row.paired_error == pytest.approx(statistics.stdev(spread), rel=0.1)


def test_perplexity_is_compared_in_nats() -> None:
    row = make_row("cloze", "perplexity", False, [-2.0, -4.0], [-3.0, -4.0])
    assert (row.metric, row.value, row.base, row.difference) == ("nats", 3.0, 3.5, -0.5)


def test_a_verdict_needs_significance_after_holm_and_thirty_items() -> None:
    clear = make_row("a", "acc", True, BETTER, BASE)
    worse = make_row("b", "bits", False, BETTER, BASE)  # higher, where lower is better
    equal = make_row("c", "acc", True, BASE, BASE)
    few = make_row("d", "acc", True, BETTER[:29], BASE[:29])
    assert [row.verdict for row in decide([clear, worse, equal, few])] == ["better", "worse", "same", "same"]
    assert equal.p == 1.0
    noise = [value + (0.1 if i % 2 else -0.1) + 0.0155 for i, value in enumerate(BASE)]
    border = make_row("e", "acc", True, noise, BASE)
    assert border.p is not None and 0.02 < border.p < 0.05  # better by itself, but one of three such rows
    assert [row.verdict for row in decide([border])] == ["better"]
    assert [row.verdict for row in decide([border, equal, equal])] == ["same"] * 3


def test_a_model_scored_by_itself_has_no_verdict() -> None:
    row = decide([make_row("a", "acc", True, BASE)])[0]
    assert (row.base, row.difference, row.verdict) == (None, None, "")
    assert make_row("a", "acc", True, [1.0]).standard_error is None


@pytest.mark.parametrize(("better", "worse", "p"), [(5, 0, 0.0625), (0, 6, 0.03125), (9, 2, 0.0654296875), (4, 4, 1.0)])
def test_right_or_wrong_has_the_exact_p(better: int, worse: int, p: float) -> None:
    """scipy.stats.binomtest(better, better + worse).pvalue"""
    same = 200 - better - worse
    row = make_row("a", "acc", True, [1] * better + [0] * worse + [1] * same, [0] * better + [1] * worse + [1] * same)
    assert row.p == pytest.approx(p, rel=1e-12)
    assert row.difference == pytest.approx((better - worse) / 200)


def test_many_items_that_differ_have_the_normal_p_too() -> None:
    """14,000 items, as of MMLU: no overflow."""
    scores, base = [1] * 7100 + [0] * 6900, [0] * 7100 + [1] * 6900
    row = make_row("a", "acc", True, scores, base)
    assert row.p == pytest.approx(math.erfc(199 / math.sqrt(14000) / math.sqrt(2)), rel=0.01)
