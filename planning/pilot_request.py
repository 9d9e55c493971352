"""What a user can ask of `pilot`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import UserError
from common.options import option
from launcher.requests import NumbersRequest

if TYPE_CHECKING:
    from common.spec import RunSpec
    from recipes.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class PilotRequest(NumbersRequest):
    """The options of `pilot`."""

    recipe: str = option("A name from `recipes`, or FILE.py:function.", metavar="RECIPE")
    budget: str = option("All trainings together, as a share of the run's steps.", metavar="PERCENT", default="10%")
    name: str | None = option("Folder pilots/NAME; default: the recipe's name.", metavar="NAME", default=None)
    rates: str | None = option(
        "Peaks to try, as factors of the recipe's; default: 0.33,1,3, or 0.2,0.5,1.5,4 without replay.",
        metavar="FACTORS",
        default=None,
    )
    shares: str | None = option(
        "Replay shares to try; default: half and twice the recipe's.", metavar="SHARES", default=None
    )
    max_forgetting: float | None = option(
        "Learn as much as possible with no old domain above its start by more (nats per token).",
        metavar="NATS",
        default=None,
    )
    json: bool = option("One JSON object on standard output.", default=False)

    def __post_init__(self) -> None:
        if self.max_forgetting is not None and not (math.isfinite(self.max_forgetting) and self.max_forgetting >= 0):
            raise UserError(
                "--max-forgetting is out of range",
                expected="nats per token, 0 or more",
                found=f"{self.max_forgetting:g}",
                do="--max-forgetting 0.05",
            )

    @property
    def budget_share(self) -> float:
        """The budget in 0..1.

        Raises:
            UserError: it is no share.
        """
        text = self.budget.strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise UserError(
                "--budget is no share of the run",
                expected="a percentage such as 10%, above 0% and up to 100%",
                found=self.budget,
                do="--budget 10%",
            )
        return share

    def numbers(self, option: str) -> tuple[float, ...] | None:
        """The numbers of `rates` or `shares`, ascending; None where the option is not given.

        Raises:
            UserError: they cannot be read, or are out of range.
        """
        text = getattr(self, option)
        if text is None:
            return None
        most, good = (1e3, "0.33,1,3") if option == "rates" else (1.0, "0.1,0.3")
        try:
            found = sorted({float(one) for one in text.split(",")})
        except ValueError:
            found = []
        lowest_ok = found and (found[0] > 0 if option == "rates" else found[0] >= 0)
        if not lowest_ok or not all(math.isfinite(one) and one <= most for one in found):
            raise UserError(
                f"--{option} cannot be used",
                expected=f"numbers {'above 0' if option == 'rates' else 'in 0..1'}, separated by commas",
                found=text,
                do=f"--{option} {good}",
            )
        return tuple(found)

    def spec(self) -> RunSpec | Resolved:
        """The run that the pilot is for.

        Raises:
            UserError: a length cannot be read.
        """
        from common.spec import RunSpec

        spec = RunSpec(
            recipe=self.recipe,
            profile=self.profile,
            memory_profile=self.memory_profile,
            overrides=self.words,
        )
        return self.with_length(spec)
