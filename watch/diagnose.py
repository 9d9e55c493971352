"""Why did this run fail? Reads its states, logs, samples and dumps, and compares them with the known failures."""

from __future__ import annotations

import dataclasses
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common import rank_states, run_status
from common.errors import EXIT_RUN
from common.rank_states import RankState
from common.run_status import Ending
from common.rundir import RunDir
from watch import log_files
from watch.diagnosis import Diagnosis, Evidence
from watch.flight_recorder import StuckCollective, find_dumps, find_stuck_collective
from watch.kernel_log import KernelMessage, read_kernel_messages
from watch.known_failures import KnownFailure, Match, find_known
from watch.log_files import LogFile
from watch.records import Records, read_records
from watch.run_facts import fill_facts, memory_advice
from watch.signs import Sign, find_signs

_EXPLAINED = re.compile(r"^ +do this: (?P<do>.+)", re.MULTILINE)  # common/errors.py writes it
_SIGNALS = (re.compile(r"Signal (\d+) \((SIG\w+)\)"), re.compile(r"exitcode\s*: -(\d+)\b"))
_EFFECTS_OF_A_LOST_RANK = ("peer_lost", "stuck_collective")
_HEALTHY = "nothing wrong was found"


@dataclass(frozen=True)
class _Case:
    """Everything that one diagnosis looks at.

    Args:
        failed: failed ranks, the first to fail first; those that only lost a peer stand behind the others.
        lost: ranks that ended without writing how (killed), or that never wrote anything.
    """

    records: Records
    logs: list[LogFile]
    kernel: list[KernelMessage]
    stuck: StuckCollective | None
    failed: list[RankState]
    lost: list[int]
    now: float


@dataclass(frozen=True)
class _Cause:
    name: str
    summary: str
    advice: str
    can_retry: bool | None
    evidence: tuple[Evidence, ...] = ()
    rank: int | None = None
    error: str = ""


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
        now: Unix time; by default the present.
    """
    now = time.time() if now is None else now
    records = read_records(run)
    case = _open_case(records, kernel, now, has_ended=exit_code is not None)
    status = records.status
    state = run_status.FAILED if exit_code is not None else status.state(now)
    signs = find_signs(records, now)
    hangs = [sign for sign in signs if sign.fatal and sign.name in ("no_step", "silent_rank")]
    if state in (run_status.FAILED, run_status.SILENT) or hangs:
        cause = _find_cause(case, signs)
    elif fatal := [sign for sign in signs if sign.fatal]:
        cause = _from_sign(run, fatal[0])
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
        signal=_signal_of(case) if cause.rank in case.lost else "",
        error=cause.error,
        evidence=cause.evidence,
    )


def _open_case(records: Records, kernel: Sequence[KernelMessage] | None, now: float, *, has_ended: bool) -> _Case:
    status = records.status
    ended = has_ended or status.state(now) in (*run_status.ENDED, run_status.SILENT)
    if kernel is None:
        kernel = _kernel_of_this_run(records)
    failed = sorted((s for s in records.ranks if s.state == rank_states.FAILED), key=lambda s: s.time)
    failed.sort(key=_is_consequence)
    known = {state.rank for state in records.ranks}
    lost = [s.rank for s in records.ranks if s.state == rank_states.RUNNING and ended]
    lost += [rank for rank in range(status.world_size) if rank not in known and known]
    logs = log_files.read_logs(records.run, status.attempt, since=status.started)
    dumps = find_dumps(records.run, status.attempt, since=max(status.started, 1.0))
    return _Case(records, logs, list(kernel), find_stuck_collective(dumps), failed, lost, now)


def _kernel_of_this_run(records: Records) -> list[KernelMessage]:
    """This machine's messages from the start of the attempt to a minute after its end, if a rank ran here."""
    import socket

    status = records.status
    if socket.gethostname() not in {state.host for state in records.ranks}:
        return []
    end = status.updated + 60 if status.phase in run_status.ENDED else time.time()
    return [message for message in read_kernel_messages() if status.started <= message.time <= end]


def _is_consequence(state: RankState) -> bool:
    match = find_known(state.error)
    return match is not None and match.failure.is_consequence


# -- the cause ---------------------------------------------------------------------------------------------------------


def _find_cause(case: _Case, signs: list[Sign]) -> _Cause:
    """The first failing rank's own error; else what its killing left behind; else what the numbers say."""
    first = case.failed[0] if case.failed else None
    match = find_known(first.error) if first is not None else None
    waited_for_lost = case.lost and match is not None and match.failure.name in _EFFECTS_OF_A_LOST_RANK
    if first is not None and not waited_for_lost:
        if match is None:
            return _unknown(case, first)
        if not match.failure.is_consequence:
            return _from_match(case, match, first.error, first.rank)
        return _behind(case, match, first.error, first.rank)
    if found := _from_logs(case, lambda failure: failure.ends_process or not failure.is_consequence):
        return found
    if fatal := [sign for sign in signs if sign.fatal and sign.name != "silent_run"]:
        return _from_sign(case.records.run, fatal[0])
    if case.lost:
        return _killed(case)
    launch_error = case.records.status.ending.error if case.records.status.ending else ""
    if launch_error:
        return _from_text(case, launch_error)
    return _Cause("unknown", "the run ended and left no error", f"look into {case.records.logs}", None)


def _behind(case: _Case, match: Match, error: str, rank: int) -> _Cause:
    """An error that is often an effect of another one: look for that one in the logs."""
    if found := _from_logs(case, lambda failure: not failure.is_consequence):
        return found
    cause = _from_match(case, match, error, rank)
    if case.stuck is not None:
        summary = f"a collective did not end: {case.stuck}"
        advice = f"the log of rank {', '.join(map(str, case.stuck.absent)) or rank} says what it did instead"
        return dataclasses.replace(cause, name="stuck_collective", summary=summary, advice=advice)
    return cause


def _from_logs(case: _Case, wanted: Callable[[KnownFailure], bool]) -> _Cause | None:
    """A known failure in the logs and in the kernel's messages; exact ones first, then the lost ranks' own."""
    kernel = "\n".join(message.text for message in case.kernel)
    first = case.lost[0] if case.lost else None
    texts = [(log.text, log) for log in log_files.in_order(case.logs, first)] + [(kernel, None)]
    found = [(match, log) for text, log in texts if text and (match := find_known(text, wanted))]
    found.sort(key=lambda pair: pair[0].failure.is_consequence)
    if not found:
        return None
    match, log = found[0]
    if log is None:
        line = kernel[kernel.rfind("\n", 0, match.position) + 1 :].split("\n")[0]
        evidence: tuple[Evidence, ...] = (Evidence("kernel log", 0, line),)
    else:
        evidence = (Evidence(str(log.path), *log.line_at(match.position)),)
    rank = log.rank if log is not None and log.rank is not None else first
    return _fill(case, match, evidence, rank, "")


def _from_match(case: _Case, match: Match, error: str, rank: int) -> _Cause:
    line = error[error.rfind("\n", 0, match.position) + 1 :].split("\n")[0]
    return _fill(case, match, (_evidence(case, rank, line),), rank, error)


def _fill(case: _Case, match: Match, evidence: tuple[Evidence, ...], rank: int | None, error: str) -> _Cause:
    """The entry's sentences with the numbers of this run."""
    match = fill_facts(match, case.records)
    advice = match.advice
    if match.failure.name == "cuda_oom":
        advice = memory_advice(case.records, match.groups) or advice
    explained = _EXPLAINED.search(error)
    if explained is not None and match.failure.name in ("token_ids", "corrupt_data", "peer_lost", "stuck_collective"):
        advice = explained["do"]
    return _Cause(match.failure.name, match.cause, advice, match.failure.can_retry, evidence, rank, error)


def _from_sign(run: RunDir, sign: Sign) -> _Cause:
    file = run.path / sign.file
    return _Cause(sign.name, sign.text, sign.advice, None, (Evidence(str(file), 0, sign.text),))


def _killed(case: _Case) -> _Cause:
    """Ranks that ended without a word, and no message says why."""
    ranks = ", ".join(map(str, case.lost))
    match = find_known("Signal 9 (SIGKILL)")
    assert match is not None
    last = next((s for s in case.records.ranks if s.rank == case.lost[0]), None)
    where = f" on {last.host}, in step {last.step}" if last is not None else ", before it wrote its state"
    summary = f"rank {ranks} ended without an error{where}: killed from outside"
    advice = fill_facts(match, case.records).advice
    file = case.records.logs / f"rank-{case.lost[0]}.json"
    evidence = Evidence(str(file), 1, "its last state is `running`") if last else Evidence(str(file), 0, "is missing")
    return _Cause("killed", summary, advice, True, (evidence,), case.lost[0])


def _unknown(case: _Case, first: RankState) -> _Cause:
    """An error that no entry fits: its own words, and its own advice if it has one."""
    lines = first.error.strip().splitlines() or ["(no text)"]
    explained = _EXPLAINED.search(first.error)
    if explained is not None:  # an error of this project: its first line says what, its last one what to do
        evidence = (_evidence(case, first.rank, lines[0]),)
        return _Cause("explained", lines[0], explained["do"], False, evidence, first.rank, first.error)
    evidence = (_evidence(case, first.rank, lines[-1]),)
    advice = f"read the traceback in {evidence[0].file}"
    return _Cause("unknown", lines[-1].strip(), advice, None, evidence, first.rank, first.error)


def _from_text(case: _Case, error: str) -> _Cause:
    """An error of the launcher, before or beside the ranks."""
    state = RankState(rank=0, state=rank_states.FAILED, exit_code=EXIT_RUN, error=error)
    match = find_known(error)
    cause = _from_match(case, match, error, 0) if match is not None else _unknown(case, state)
    return dataclasses.replace(cause, rank=None)


def _evidence(case: _Case, rank: int, line: str) -> Evidence:
    """Where a line of a rank's error stands in its log."""
    for log in log_files.in_order(case.logs, rank):
        if log.rank == rank and (number := log.find_line(line)) is not None:
            return Evidence(str(log.path), number, line)
    return Evidence(str(case.records.logs / f"rank-{rank}.json"), 1, line)


def _signal_of(case: _Case) -> str:
    """The signal that ended a lost rank, from what started the ranks."""
    for log in case.logs:
        for pattern in _SIGNALS:
            if found := pattern.search(log.text):
                return signal.Signals(int(found[1])).name if int(found[1]) in set(signal.Signals) else ""
    return ""


# -- what else -------------------------------------------------------------------------------------------------------


def _notes(case: _Case, signs: list[Sign], cause: _Cause | None) -> list[str]:
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


def _earlier_attempts(run: RunDir, attempt: int, cause: _Cause | None) -> list[str]:
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
