"""Paired comparison of two models on the same items: differences, standard errors, and which of them are significant.

The harness logs for each item what it scored. Both models see the same items, so that the difference of each item is
known, and its standard error is much smaller than that of the two scores: what makes an item hard is in both.

- A mean over items (acc, acc_norm): mean of the differences, with their standard deviation / sqrt(items). Where every
  score is 0 or 1, p is that of the exact sign test (McNemar's test): with a few items that differ, a normal p is far
  too small, 0.024 instead of 0.0625 for 5 of 200 that are all better.
- `perplexity` is exp(-mean log-likelihood): shown in nats per item, where differences add up.
- A ratio of sums (bits_per_byte, byte_perplexity, word_perplexity): standard error of a ratio estimator by the delta
  method (Cochran 1977, Sampling Techniques, 6.4). The perplexities are shown in bits.

Why paired: Miller 2024, "Adding Error Bars to Evals", arXiv 2411.00640, section 4.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

LEVEL = 0.05
FEWEST_ITEMS = 30
RULE = (
    f"better or worse: two-sided p < {LEVEL} of the paired difference, after Holm's correction over all rows; "
    f"same: not significant, or fewer than {FEWEST_ITEMS} items"
)
IN_LOG = {"perplexity": "nats", "byte_perplexity": "bits per byte", "word_perplexity": "bits per word"}

Score = float | tuple[float, float]  # of an item: a number, or (log-likelihood in nats, its weight)


@dataclass(frozen=True)
class Row:
    """One metric of one task.

    Args:
        items: number of items that were scored.
        value: of the model; means of the items, or sum of bits by sum of weights.
        standard_error: of `value`; None for a single item.
        base: of the model it is compared with; None without one.
        difference: value - base.
        paired_error: standard error of `difference`.
        p: two-sided, of the difference being zero, before any correction; exact where every item is 0 or 1.
        verdict: "better", "same" or "worse"; "" without a base.
    """

    task: str
    metric: str
    items: int
    higher_is_better: bool
    value: float
    standard_error: float | None
    base: float | None = None
    difference: float | None = None
    paired_error: float | None = None
    p: float | None = None
    verdict: str = ""


def make_row(
    task: str, metric: str, higher_is_better: bool, scores: Sequence[Score], base: Sequence[Score] | None = None
) -> Row:
    """The row of one metric, without its verdict, which needs the other rows (`decide`).

    Args:
        scores: of each item, as the harness logs them.
        base: of the same items, in the same order, by the model it is compared with.
    """
    own = _terms(metric, scores)
    value, error = _ratio(own)
    row = Row(task, IN_LOG.get(metric, metric), len(scores), higher_is_better, value, error)
    if base is None:
        return row
    other = _terms(metric, base)
    assert len(own) == len(other), (task, metric)
    difference, paired = _ratio([(a - b, weight) for (a, weight), (b, _) in zip(own, other, strict=True)])
    p = _sign_test(scores, base) if _is_right_or_wrong([*scores, *base]) else _two_sided(difference, paired)
    return replace(row, base=_ratio(other)[0], difference=difference, paired_error=paired, p=p)


def decide(rows: Sequence[Row]) -> list[Row]:
    """The rows with their verdicts, by `RULE` (Holm 1979: the k-th smallest of m p-values is held to LEVEL/(m-k))."""
    compared = sorted((row.p, place) for place, row in enumerate(rows) if row.p is not None)
    significant: set[int] = set()
    for rank, (p, place) in enumerate(compared):
        if p >= LEVEL / (len(compared) - rank):
            break
        significant.add(place)
    return [_with_verdict(row, place in significant) for place, row in enumerate(rows)]


def _with_verdict(row: Row, significant: bool) -> Row:
    if row.difference is None:
        return row
    if not significant or row.items < FEWEST_ITEMS:
        return replace(row, verdict="same")
    return replace(row, verdict="better" if (row.difference > 0) == row.higher_is_better else "worse")


def _terms(metric: str, scores: Sequence[Score]) -> list[tuple[float, float]]:
    """(numerator, weight) of each item, such that the metric is their ratio of sums."""
    terms = []
    for score in scores:
        if isinstance(score, (tuple, list)):  # log-likelihood and bytes or words
            terms.append((-score[0] / math.log(2), float(score[1])))
        else:
            terms.append((-float(score) if metric in IN_LOG else float(score), 1.0))
    return terms


def _ratio(terms: list[tuple[float, float]]) -> tuple[float, float | None]:
    """Sum of the numerators by sum of the weights, and its standard error (None for a single item)."""
    count, weight = len(terms), math.fsum(weight for _, weight in terms)
    ratio = math.fsum(number for number, _ in terms) / weight
    if count < 2:
        return ratio, None
    squares = math.fsum((number - ratio * weight_) ** 2 for number, weight_ in terms)
    return ratio, math.sqrt(squares * count / (count - 1)) / weight


def _is_right_or_wrong(scores: Sequence[Score]) -> bool:
    return len(scores) > 2 and all(not isinstance(score, (tuple, list)) and score in (0, 1) for score in scores)


def _sign_test(scores: Sequence[Score], base: Sequence[Score]) -> float:
    """The exact two-sided p-value of as many items being better as worse, each 0 or 1 (McNemar 1947)."""
    better = sum(own == 1 and other == 0 for own, other in zip(scores, base, strict=True))
    worse = sum(own == 0 and other == 1 for own, other in zip(scores, base, strict=True))
    from scipy import special

    return min(1.0, 2.0 * float(special.bdtr(min(better, worse), better + worse, 0.5)))


def _two_sided(difference: float, error: float | None) -> float | None:
    """The p-value of a normal statistic; 1 for equal scores, None if nothing is known of the error."""
    if error is None:
        return None
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return math.erfc(abs(difference / error) / math.sqrt(2))
