"""A forgetting budget: the replay share follows the validation, so that what is forgotten stays below a limit.

After every validation the share moves by one step in log-odds. Of each domain with a budget, the loss above that of
step 0 is divided by its budget, which gives the part of the budget that is used. It is continued to the next validation
by its last change, and the largest of the domains decides:

    expected = used + (used - used before),      log-odds += GAIN * (expected - AIM), at most MOST_STEP either way,

and the share stays within its bounds. So it rises before the budget is used up, and falls where replay is not needed,
which leaves more tokens to the new text. All of this is a function of the validation's losses, which are the same on
all ranks, and of the state in the token ledger, which every checkpoint has. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

AIM = 0.8  # of the budget: the loss follows the share with a delay, and validation has an error
GAIN = 2.0  # log-odds of the share, for a whole budget of difference
MOST_STEP = 1.0  # log-odds per validation: 10% becomes 23% or 4%
BOUNDS = (0.01, 0.5)  # of the share, where the run does not say others


@dataclass(frozen=True)
class Budget:
    """What the user asks for.

    Args:
        limits: domain -> nats per token above its loss at step 0.
        low, high: bounds of the replay share.
    """

    limits: dict[str, float]
    low: float = BOUNDS[0]
    high: float = BOUNDS[1]

    def clip(self, share: float) -> float:
        """The nearest share within the bounds."""
        return min(max(share, self.low), self.high)

    def used(self, losses: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
        """Domain -> the part of its budget that is used; below 0 where its loss has fallen."""
        return {name: (losses[name] - base[name]) / limit for name, limit in self.limits.items()}

    def next_share(self, share: float, used: Mapping[str, float], before: Mapping[str, float]) -> float:
        """The replay share after a validation.

        Args:
            share: the one decided last.
            used: the part of each budget that is used now.
            before: the same at the validation before this one; of a domain without an entry it is not known, which
                counts as no change.
        """
        expected = [now + (now - before.get(name, now)) for name, now in used.items()]
        if any(map(math.isnan, expected)):  # of a run that diverged
            return share
        step = min(max(GAIN * (max(expected) - AIM), -MOST_STEP), MOST_STEP)
        odds = math.log(share / (1.0 - share)) + step
        return self.clip(1.0 / (1.0 + math.exp(-odds)))


@dataclass(frozen=True)
class BudgetState:
    """What the next decision follows from; a part of the token ledger.

    Args:
        base: domain -> loss at step 0.
        share: the replay share decided last.
        first: the step from which it is read.
        decided: the step whose validation decided it.
        used: domain -> the part of its budget that was used at the last validation; empty where the run was given this
            budget after its start, and has not been validated since.
    """

    base: dict[str, float]
    share: float
    first: int = 0
    decided: int = 0
    used: dict[str, float] = field(default_factory=dict)


def make_budget(limits: Mapping[str, float] | None, bounds: tuple[float, ...] | list[float] | None) -> Budget | None:
    """The budget of a run whose numbers have been checked (recipes/forgetting.py); None where it has none."""
    return None if limits is None else Budget(dict(limits), *(bounds or BOUNDS))
