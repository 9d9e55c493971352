"""Can the same command succeed? Asked where a failed run ended and a scheduler would start it again.

    python -m watch.retry_helps runs/NAME CODE

The batch script of Slurm and the pods of Kubernetes call it with the exit code of what started the ranks. Its own is 4
where a retry cannot help, and 0 where it can or nothing is known; anything else means that it could not look.
"""

from __future__ import annotations

import sys

from common import rank_states
from common.errors import EXIT_NO_RETRY, EXIT_PREFLIGHT, EXIT_USER
from common.run_status import RunStatus, read_status
from common.rundir import RunDir
from watch.diagnose import explain_failure

_FOR_THE_USER = (EXIT_USER, EXIT_PREFLIGHT)  # what only the user can mend


def find_reason_to_stop(run: RunDir, code: int) -> str:
    """Why a retry of the newest attempt cannot help; an empty text if it can or nothing is known.

    Args:
        code: of what started the ranks, which hides their own.
    """
    status = read_status(run.status) or RunStatus()
    codes = {code, *(state.exit_code for state in rank_states.read(run.attempt(status.attempt)))}
    ending = explain_failure(run, code)
    why = ending.summary + (f"; do this: {ending.advice}" if ending.advice else "")
    if ending.can_retry is False:
        return why
    found = sorted(codes.intersection(_FOR_THE_USER))
    return f"a rank ended with code {found[0]}: {why}" if found else ""


def main(argv: list[str]) -> int:
    """Say on standard error why a retry cannot help, if so; returns the exit code."""
    reason = find_reason_to_stop(RunDir.at(argv[0]), int(argv[1]))
    if reason:
        print(f"no retry: {reason}", file=sys.stderr)
    return EXIT_NO_RETRY if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
