"""Why did this run fail? Reads its states, logs, samples and dumps, and compares them with the known failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common import rank_states, run_status
from common.run_status import Ending
from common.rundir import RunDir
from watch.case import Case, open_case
from watch.cause import Cause, cause_from_sign, find_cause, signal_of
from watch.diagnosis import Diagnosis
from watch.kernel_log import KernelMessage
from watch.known_failures import find_known
from watch.records import read_records
from watch.signs import Sign, find_signs

_HEALTHY = "nothing wrong was found"


def diagnose(
    run: RunDir,
    *,
    exit_code: int | None = None,
    kernel: Sequence[KernelMessage] | None = None,
    now: float | None = None,
) -> Diagnosis:
    """Say what is wrong with a run.

    Args:
        exit_code: of a launch that has just failed, whose ranks have all ended; None looks at the status.
        kernel: messages of the kernel; by default those of this machine, if the run was on it.
        now: Unix time; by default the present by the clock of the machine that writes the status.
    """
    now = run_status.read_clock(run.status) if now is None else now
    records = read_records(run)
    case = open_case(records, kernel, now, has_ended=exit_code is not None)
    status = records.status
    state = run_status.FAILED if exit_code is not None else status.state(now)
    signs = find_signs(records, now)
    hangs = [sign for sign in signs if sign.fatal and sign.name in ("no_step", "silent_rank")]
    if state in (run_status.FAILED, run_status.SILENT) or hangs:
        cause = find_cause(case, signs)
    elif fatal := [sign for sign in signs if sign.fatal]:
        cause = cause_from_sign(run, fatal[0])
    else:
        cause = None
    ending = status.ending or Ending()
    result = Diagnosis(
        run=str(run.path),
        state=state,
        attempt=status.attempt,
        step=status.step,
        max_steps=status.max_steps,
        exit_code=ending.exit_code if exit_code is None else exit_code,
        notes=(*_notes(case, signs, cause), *_earlier_attempts(run, status.attempt, cause)),
    )
    if cause is None:
        return dataclasses.replace(result, summary=_HEALTHY if not signs else "")
    host = next((s.host for s in records.ranks if s.rank == cause.rank), "")
    return dataclasses.replace(
        result,
        cause=cause.name,
        summary=cause.summary,
        advice=cause.advice,
        can_retry=cause.can_retry,
        rank=cause.rank,
        host=host,
        signal=signal_of(case) if cause.rank in case.lost else "",
        error=cause.error,
        evidence=cause.evidence,
    )


def _notes(case: Case, signs: list[Sign], cause: Cause | None) -> list[str]:
    notes = [sign.text for sign in signs if cause is None or sign.text != cause.summary]
    others = [state for state in case.failed if cause is None or state.rank != cause.rank]
    for state in others[:3]:
        notes.append(f"rank {state.rank} then: {(state.error.strip().splitlines() or ['?'])[0][:200]}")
    if case.stuck is not None and (cause is None or str(case.stuck) not in cause.summary):
        notes.append(f"flight recorder: {case.stuck}")
    steps = {state.rank: state.step for state in case.records.ranks}
    if steps and max(steps.values()) - min(steps.values()) > 1:
        slowest = min(steps, key=lambda rank: steps[rank])
        notes.append(f"rank {slowest} is in step {steps[slowest]}, the furthest in step {max(steps.values())}")
    return notes


def _earlier_attempts(run: RunDir, attempt: int, cause: Cause | None) -> list[str]:
    """What earlier attempts died of, where their ranks say so."""
    notes = []
    for path in run.attempts:
        number = int(path.name.partition("-")[2])
        first = rank_states.first_failure(rank_states.read(path))
        if number >= attempt or first is None:
            continue
        match = find_known(first.error)
        name = match.failure.name if match else (first.error.strip().splitlines() or ["?"])[-1][:120]
        same = ": the same cause, so another retry will not help" if cause is not None and name == cause.name else ""
        notes.append(f"attempt {number} failed too, rank {first.rank}: {name}{same}")
    return notes


def explain_failure(run: RunDir, exit_code: int) -> Ending:
    """What the launcher writes to status.json and says after a failure (launcher/outcome.py). Never raises."""
    try:
        return diagnose(run, exit_code=exit_code).ending()
    except Exception as problem:  # the failure of the run must not be hidden by one of its diagnosis
        return Ending(exit_code=exit_code, summary=f"the diagnosis itself failed: {type(problem).__name__}: {problem}")
