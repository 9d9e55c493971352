"""The errors a user can cause, each with an exit code and the three facts that end the guessing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_RUN = 1
EXIT_USER = 2
EXIT_PREFLIGHT = 3
EXIT_INTERRUPTED = 130


class ProjectError(Exception):
    """A failure that is explained: what was expected, what was found, what to do.

    Args:
        what: one line that names the failure.
        expected: the state that would have been fine.
        found: the state that is there instead, with the value seen.
        do: the command or the edit that leads on.
    """

    exit_code = EXIT_RUN

    def __init__(self, what: str, *, expected: str = "", found: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.found, self.do = what, expected, found, do

    def explain(self) -> str:
        """The whole text, also where a library has added to `str(self)`."""
        rows = [("expected", self.expected), ("found", self.found), ("do this", self.do)]
        return "\n".join([self.what, *(f"  {name:>8}: {text}" for name, text in rows if text)])

    def __str__(self) -> str:
        return self.explain()

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword fields when the error crosses a process border."""
        return _rebuild, (type(self), self.what, self.expected, self.found, self.do)


def _rebuild(kind: type[ProjectError], what: str, expected: str, found: str, do: str) -> ProjectError:
    return kind(what, expected=expected, found=found, do=do)


class UserError(ProjectError):
    """Wrong command line, recipe, override, or input file (exit code 2)."""

    exit_code = EXIT_USER


def unknown_name(kind: str, name: str, names: Iterable[str], otherwise: str, also: str = "") -> UserError:
    """`name` is none of `names`: which there are, and the one that was probably meant.

    Args:
        kind: what it would be the name of.
        otherwise: what to do where no name is near.
        also: what else would be understood.
    """
    known = list(names)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return UserError(
        f"unknown {kind} {name!r}",
        expected="one of " + ", ".join(known) + also,
        found=repr(name),
        do=f"did you mean {near[0]!r}?" if near else otherwise,
    )


class PreflightError(ProjectError):
    """The machine or the data cannot carry the run that was asked for (exit code 3)."""

    exit_code = EXIT_PREFLIGHT


class GateError(ProjectError):
    """A truth gate is violated: the run would train on something else than was asked for (exit code 1)."""
