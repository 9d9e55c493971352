"""The result of `diagnose`: the cause of a failed run, its evidence, what to do, and whether a retry can help."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from common.run_status import MOST_ERROR_TEXT, Ending


@dataclass(frozen=True)
class Evidence:
    """One line of a file; `line` counts from 1, and is 0 where the file has no lines of interest."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}{f':{self.line}' if self.line else ''}: {self.text.strip()[:300]}"


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is known about a run.

    Args:
        run: the run directory.
        state: a phase of common/run_status.py, or `silent`.
        cause: the name of a known failure or sign; "unknown" for an error that no entry fits; "" if nothing failed.
        summary, advice: one line each.
        can_retry: whether the same command can succeed when it is started again; None where it is unknown.
        rank, host, signal, error: of the rank that failed first, as far as they are known.
        notes: what else is unusual, one sentence each.
    """

    run: str
    state: str
    attempt: int
    step: int
    max_steps: int
    exit_code: int = 0
    cause: str = ""
    summary: str = ""
    advice: str = ""
    can_retry: bool | None = None
    rank: int | None = None
    host: str = ""
    signal: str = ""
    error: str = ""
    evidence: tuple[Evidence, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """The cause has a name, so that its advice can stand in place of a traceback."""
        return self.cause not in ("", "unknown")

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def ending(self) -> Ending:
        """The same for status.json."""
        return Ending(
            exit_code=self.exit_code,
            rank=self.rank,
            host=self.host,
            signal=self.signal,
            error=self.error[-MOST_ERROR_TEXT:],
            cause=self.cause if self.is_known else "",
            summary=self.summary,
            advice=self.advice,
            can_retry=self.can_retry,
        )

    def to_text(self) -> str:
        """A few lines for people."""
        retry = {True: "can help", False: "the same command fails again", None: "unknown whether it helps"}
        where = f"rank {self.rank}" + (f" on {self.host}" if self.host else "") if self.rank is not None else ""
        rows = [
            ("cause", self.summary + (f" ({self.cause})" if self.is_known else "") if self.summary else ""),
            ("where", where),
            *(("evidence" if n == 0 else "", str(one)) for n, one in enumerate(self.evidence)),
            ("do this", self.advice),
            ("retry", retry[self.can_retry] if self.cause else ""),
            *(("also" if n == 0 else "", note) for n, note in enumerate(self.notes)),
        ]
        head = f"{Path(self.run)}: {self.state} (attempt {self.attempt}, step {self.step} of {self.max_steps})"
        return "\n".join([head, *(f"  {name:>8}  {text}" for name, text in rows if text)])
