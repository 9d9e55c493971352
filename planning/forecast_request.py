"""What a user can ask of `forecast`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.errors import UserError
from common.options import option


@dataclass(frozen=True, kw_only=True)
class ForecastRequest:
    """The options of `forecast`."""

    run: str = option("A run: NAME or runs/NAME.")
    from_: float | None = option(
        "Use this share of the run only, in 0..1 (--from 0.25).", metavar="FRACTION", default=None
    )
    at: int | None = option("Use the validations until this step only.", metavar="STEP", default=None)
    like: list[str] | None = option(
        "An earlier run to learn the law from (may be repeated); default: all finished runs of this kind.",
        metavar="RUN",
        default=None,
    )
    alone: bool = option("Learn from no other run.", default=False)
    domain: str | None = option("Only this domain.", metavar="NAME", default=None)
    json: bool = option("One JSON object on standard output.", default=False)
    runs: str = option("Folder of the run directories.", metavar="DIR", default="runs")

    def __post_init__(self) -> None:
        if self.from_ is not None and self.at is not None:
            raise UserError(
                "--from and --at both say which part of the run is used",
                expected="one of them",
                found=f"--from {self.from_:g} --at {self.at}",
                do=f"leave --at {self.at} out",
            )
        if self.from_ is not None and not (math.isfinite(self.from_) and 0 < self.from_ < 1):
            raise UserError(
                "--from is out of range",
                expected="a share of the run, above 0 and below 1",
                found=f"{self.from_:g}",
                do="--from 0.25",
            )
        if self.alone and self.like:
            raise UserError(
                "--alone learns from no other run",
                expected="no --like beside it",
                found=f"--like {self.like[0]}",
                do="leave one of the two out",
            )
