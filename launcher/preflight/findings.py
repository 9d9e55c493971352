"""What a preflight check hands back."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import PreflightError, ProjectError, UserError


@dataclass(frozen=True)
class Finding:
    """An error (the run cannot start) or a warning (it can, but look).

    Args:
        in_numbers: it follows from the numbers of the run, so that no machine and no data can mend it.
    """

    problem: ProjectError
    fatal: bool = True
    in_numbers: bool = False


def error(what: str, *, expected: str, found: str, do: str) -> Finding:
    """The run cannot start."""
    return Finding(PreflightError(what, expected=expected, found=found, do=do))


def warning(what: str, *, expected: str, found: str, do: str) -> Finding:
    """The run can start, but look."""
    return Finding(UserError(what, expected=expected, found=found, do=do), fatal=False)
