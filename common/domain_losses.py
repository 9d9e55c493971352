"""What one validation of a domain measured, and when a change since the first one is called learned or forgotten.

A validation row of metrics.jsonl holds these numbers by domain. Runs of earlier versions recorded loss, perplexity and
bits per byte only, so everything else may be absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

STANDARD_ERRORS = 2.0  # a change within so many standard errors is not told apart from none (about 95% confidence)
UNCHANGED = 0.005  # nats per token; a smaller change is called unchanged, however well it is measured
LEARNED, FORGOTTEN, SAME, UNCLEAR = "learned", "forgotten", "unchanged", "no clear change"
NOT_A_NUMBER, NOT_TRAINED = "not a number", "not trained yet"


@dataclass(frozen=True)
class DomainLoss:
    """One validation of one domain; losses and errors in nats per token.

    Args:
        loss: mean over all tokens.
        tokens: tokens that the mean is taken over.
        documents: documents that these tokens belong to.
        standard_error: of the loss, with the documents as the independent observations; None for fewer than two.
        change: loss minus that of the first validation, on the same documents.
        change_standard_error: of the change, from the differences of each document (paired). It is much smaller than
            what the errors of the two losses come to, because what makes a document hard is the same in both.
        change_since: step of the first validation.
    """

    loss: float
    tokens: int | None = None
    documents: int | None = None
    standard_error: float | None = None
    change: float | None = None
    change_standard_error: float | None = None
    change_since: int | None = None


def read_domain_losses(row: dict[str, Any]) -> dict[str, DomainLoss]:
    """The domains of a validation row of metrics.jsonl; those without a loss are left out."""
    found = row.get("validation")
    domains = found.items() if isinstance(found, dict) else ()
    return {name: loss for name, values in domains if (loss := read_domain_loss(values)) is not None}


def read_domain_loss(values: Any) -> DomainLoss | None:
    """The numbers of one domain; None without a loss."""
    if not isinstance(values, dict) or (loss := _number(values.get("loss"))) is None:
        return None
    tokens, documents, since = (_number(values.get(name)) for name in ("tokens", "documents", "change_since"))
    return DomainLoss(
        loss,
        None if tokens is None else int(tokens),
        None if documents is None else int(documents),
        _number(values.get("standard_error")),
        _number(values.get("change")),
        _number(values.get("change_standard_error")),
        None if since is None else int(since),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def change_error(first: DomainLoss, last: DomainLoss, first_step: int) -> tuple[float | None, bool]:
    """The standard error of `last.loss - first.loss`, and whether it is a paired one.

    It is paired where `last` was compared with that first validation document by document. Otherwise it follows from
    the errors of the two losses, as if they were of different documents. None where neither was recorded.
    """
    if last.change_standard_error is not None and last.change_since == first_step:
        return last.change_standard_error, True
    if first.standard_error is not None and last.standard_error is not None:
        return math.hypot(first.standard_error, last.standard_error), False
    return None, False


def name_change(change: float, error: float | None) -> str:
    """A change of the loss in words: learned, forgotten, unchanged, or no clear change.

    Args:
        change: nats per token; negative is learned.
        error: its standard error; None where it was not recorded, so that only `UNCHANGED` decides.
    """
    if math.isnan(change):
        return NOT_A_NUMBER
    if error is not None and not abs(change) > STANDARD_ERRORS * error:
        return SAME if abs(change) < UNCHANGED and STANDARD_ERRORS * error < UNCHANGED else UNCLEAR
    if abs(change) < UNCHANGED:
        return SAME
    return LEARNED if change < 0 else FORGOTTEN


def format_change(change: float, error: float | None, digits: int = 2) -> str:
    """`−0.73 ± 0.03`: the change in nats per token and two standard errors of it."""
    if math.isnan(change):
        return "NaN"
    text = f"{change:+.{digits}f}".replace("-", "\u2212")
    return text if error is None else f"{text} ± {STANDARD_ERRORS * error:.{digits}f}"
