"""One kind of failure with the wording that names it, and what a match says about a run."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownFailure:
    """One kind of failure.

    Args:
        name: stable, for other programs.
        patterns: regular expressions; one match is enough. Named groups can be used in `cause` and `advice`.
        cause: one line that says what happened.
        advice: what to do, with the command or the override where there is one.
        can_retry: whether the same command can succeed when it is started again.
        is_consequence: often only an effect of another failure (a rank that lost its peer), so that a match of another
            entry anywhere in the logs of the attempt is preferred.
        ends_process: of a consequence that it says how a process ended which could not write its own error.
    """

    name: str
    patterns: tuple[str, ...]
    cause: str
    advice: str
    can_retry: bool = False
    is_consequence: bool = False
    ends_process: bool = False

    def search(self, text: str) -> Match | None:
        """The first match of the first pattern that matches."""
        for pattern in self.patterns:
            if found := re.search(pattern, text):
                return Match(self, found.start(), {k: v for k, v in found.groupdict().items() if v})
        return None


@dataclass(frozen=True)
class Match:
    """An entry that fits a text, where, and what its groups hold."""

    failure: KnownFailure
    position: int
    groups: dict[str, str]

    @property
    def cause(self) -> str:
        return _fill(self.failure.cause, self.groups)

    @property
    def advice(self) -> str:
        return _fill(self.failure.advice, self.groups)


def _fill(text: str, groups: dict[str, str]) -> str:
    """Replace {name}; a part in [brackets] whose group has no value is left out."""

    def part(found: re.Match[str]) -> str:
        inside = found[1]
        names = re.findall(r"\{(\w+)\}", inside)
        return inside if all(name in groups for name in names) else ""

    text = re.sub(r"\[([^\[\]]*\{\w+\}[^\[\]]*)\]", part, text)
    return re.sub(r"\{(\w+)\}", lambda found: groups.get(found[1], "?"), text)
