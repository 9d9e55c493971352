"""Typed errors with an exit code, each saying what was expected, what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_RUN = 1
EXIT_USER = 2
EXIT_PREFLIGHT = 3
EXIT_NO_RETRY = 4  # of watch/retry_helps.py
EXIT_INTERRUPTED = 130


class ProjectError(Exception):
    """A failure with an explanation.

    Args:
        what: the failure in one line.
        expected: what would have been correct.
        found: what is there instead, with its value.
        do: the command or the edit that solves it.
    """

    exit_code = EXIT_RUN

    def __init__(self, what: str, *, expected: str = "", found: str = "", do: str = "") -> None:
        super().__init__(what)
        self.what, self.expected, self.found, self.do = what, expected, found, do

    def explain(self) -> str:
        """The full text, without what a library may have added to `str(self)`."""
        rows = [("expected", self.expected), ("found", self.found), ("do this", self.do)]
        return "\n".join([self.what, *(f"  {name:>8}: {text}" for name, text in rows if text)])

    def __str__(self) -> str:
        return self.explain()

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword fields when the error is pickled and sent to another process."""
        return _rebuild, (type(self), self.what, self.expected, self.found, self.do)


def _rebuild(kind: type[ProjectError], what: str, expected: str, found: str, do: str) -> ProjectError:
    return kind(what, expected=expected, found=found, do=do)


class UserError(ProjectError):
    """A wrong command line, recipe, override or input file (exit code 2)."""

    exit_code = EXIT_USER


def unknown_name(
    kind: str, name: str, names: Iterable[str], otherwise: str, also: str = "", typed: str = "{}"
) -> UserError:
    """The error for a name that is not one of `names`; it suggests the most similar one, whatever its case.

    Args:
        kind: what the name is of, such as "recipe".
        otherwise: what to do if no name is similar.
        also: text after the names, for other inputs that are accepted.
        typed: how the name is typed, such as "--recipe {}".
    """
    known = list(names)
    folded = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.7)  # below it, cpu would be taken for gpu
    near = near or [one for one in folded if name.strip() and one.startswith(name.lower())][:1]
    return UserError(
        f"unknown {kind} {name!r}",
        expected="one of " + ", ".join(known) + also,
        found=repr(name),
        do=f"did you mean {typed.format(folded[near[0]])}?" if near else otherwise,
    )


class PreflightError(ProjectError):
    """The machine or the data does not allow the requested run (exit code 3)."""

    exit_code = EXIT_PREFLIGHT


class GateError(ProjectError):
    """A check during training failed: the run would train something other than the recipe says (exit code 1)."""


class DiagnosedError(ProjectError):
    """A library's error during a run, replaced by its known cause; the traceback is in the rank's log (exit code 1)."""
