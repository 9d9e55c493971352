"""One item of the passport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["pass", "fail", "unknown", "not applicable"]


@dataclass(frozen=True)
class Item:
    """One check, with what was expected and what was found."""

    name: str
    state: State
    expected: str
    found: str
