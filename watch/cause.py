"""Which failure was the first: of the ranks' errors, the logs, the kernel's messages and the numbers of a run."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from common import rank_states
from common.errors import EXIT_RUN
from common.rank_states import RankState
from common.rundir import RunDir
from watch import log_files
from watch.case import Case
from watch.diagnosis import Evidence
from watch.known_failure import KnownFailure, Match
from watch.known_failures import find_known
from watch.run_facts import fill_facts, memory_advice
from watch.signs import Sign

_EXPLAINED = re.compile(r"^ +do this: (?P<do>.+)", re.MULTILINE)  # common/errors.py writes it
_SIGNAL_NUMBERS = (re.compile(r"Signal (\d+) \(SIG\w+\)"), re.compile(r"exitcode\s*: -(\d+)\b"))
_SIGNAL_NAME = re.compile(rf"{re.escape(rank_states.WITHOUT_ERROR)}: (SIG\w+)")
_CRASHES = ("SIGABRT", "SIGILL", "SIGFPE", "SIGSYS")  # beside SIGSEGV and SIGBUS, which are known failures
_EFFECTS_OF_A_LOST_RANK = ("peer_lost", "stuck_collective")
_KEEP_OWN_ADVICE = ("token_ids", "corrupt_data", "peer_lost", "stuck_collective")  # errors of this project that fit


@dataclass(frozen=True)
class Cause:
    """The cause of a failure; the fields are those of Diagnosis."""

    name: str
    summary: str
    advice: str
    can_retry: bool | None
    evidence: tuple[Evidence, ...] = ()
    rank: int | None = None
    error: str = ""


def find_cause(case: Case, signs: list[Sign]) -> Cause:
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
        return cause_from_sign(case.records.run, fatal[0])
    if case.lost:
        return _killed(case)
    launch_error = case.records.status.ending.error if case.records.status.ending else ""
    if launch_error:
        return _from_text(case, launch_error)
    return Cause("unknown", "the run ended and left no error", f"look into {case.records.logs}", None)


def _behind(case: Case, match: Match, error: str, rank: int) -> Cause:
    """An error that is often an effect of another one: look for that one in the logs."""
    if found := _from_logs(case, lambda failure: not failure.is_consequence):
        return found
    cause = _from_match(case, match, error, rank)
    if case.stuck is not None:
        summary = f"a collective did not end: {case.stuck}"
        advice = f"the log of rank {', '.join(map(str, case.stuck.absent)) or rank} says what it did instead"
        return dataclasses.replace(cause, name="stuck_collective", summary=summary, advice=advice)
    return cause


def _from_logs(case: Case, wanted: Callable[[KnownFailure], bool]) -> Cause | None:
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


def _from_match(case: Case, match: Match, error: str, rank: int) -> Cause:
    line = error[error.rfind("\n", 0, match.position) + 1 :].split("\n")[0]
    return _fill(case, match, (_evidence(case, rank, line),), rank, error)


def _fill(case: Case, match: Match, evidence: tuple[Evidence, ...], rank: int | None, error: str) -> Cause:
    """The entry's sentences with the numbers of this run."""
    match = fill_facts(match, case.records)
    advice = match.advice
    if match.failure.name == "cuda_oom":
        advice = memory_advice(case.records, match.groups) or advice
    explained = _EXPLAINED.search(error)
    if explained is not None and match.failure.name in _KEEP_OWN_ADVICE:
        advice = explained["do"]
    return Cause(match.failure.name, match.cause, advice, match.failure.can_retry, evidence, rank, error)


def cause_from_sign(run: RunDir, sign: Sign) -> Cause:
    """A sign in the numbers as the cause."""
    file = run.path / sign.file
    return Cause(sign.name, sign.text, sign.advice, None, (Evidence(str(file), 0, sign.text),))


def _killed(case: Case) -> Cause:
    """Ranks that ended without recording how, and no log line says why."""
    ranks = ", ".join(map(str, case.lost))
    match = find_known("Signal 9 (SIGKILL)")
    assert match is not None
    last = next((s for s in case.records.ranks if s.rank == case.lost[0]), None)
    where = f" on {last.host}, in step {last.step}" if last is not None else ", before it wrote its state"
    if (crash := signal_of(case)) in _CRASHES:
        name, why = "crashed", f"a library crashed ({crash})"
        advice = "the lines before it in the log say where; check that its versions fit (python launch.py doctor)"
    else:
        name, why, advice = "killed", "killed from outside", fill_facts(match, case.records).advice
    summary = f"rank {ranks} ended without an error{where}: {why}"
    file = case.records.logs / f"rank-{case.lost[0]}.json"
    evidence = Evidence(str(file), 1, "its last state is `running`") if last else Evidence(str(file), 0, "is missing")
    return Cause(name, summary, advice, True, (evidence, *_first_error(case)), case.lost[0])


def _first_error(case: Case) -> list[Evidence]:
    """The first line that looks like an error in the log of a lost rank, or of what started the ranks."""
    own = [log for log in case.logs if log.rank in case.lost or (log.rank is None and log.path.name != "launcher.log")]
    found = [Evidence(str(log.path), *error) for log in own if (error := log.first_error()) is not None]
    return found[:1]


def _unknown(case: Case, first: RankState) -> Cause:
    """An error that no entry fits: its own words, and its own advice if it has one."""
    lines = first.error.strip().splitlines() or ["(no text)"]
    explained = _EXPLAINED.search(first.error)
    if explained is not None:  # an error of this project: its first line says what, its last one what to do
        evidence = (_evidence(case, first.rank, lines[0]),)
        return Cause("explained", lines[0], explained["do"], False, evidence, first.rank, first.error)
    evidence = (_evidence(case, first.rank, lines[-1]),)
    advice = f"read the traceback in {evidence[0].file}"
    return Cause("unknown", lines[-1].strip(), advice, None, evidence, first.rank, first.error)


def _from_text(case: Case, error: str) -> Cause:
    """An error of the launcher, before or beside the ranks."""
    state = RankState(rank=0, state=rank_states.FAILED, exit_code=EXIT_RUN, error=error)
    match = find_known(error)
    cause = _from_match(case, match, error, 0) if match is not None else _unknown(case, state)
    return dataclasses.replace(cause, rank=None)


def _evidence(case: Case, rank: int, line: str) -> Evidence:
    """Where a line of a rank's error stands in its log."""
    for log in log_files.in_order(case.logs, rank):
        if log.rank == rank and (number := log.find_line(line)) is not None:
            return Evidence(str(log.path), number, line)
    return Evidence(str(case.records.logs / f"rank-{rank}.json"), 1, line)


def signal_of(case: Case) -> str:
    """The signal that ended a lost rank, from what started the ranks."""
    for log in case.logs:
        for pattern in _SIGNAL_NUMBERS:
            if found := pattern.search(log.text):
                return signal.Signals(int(found[1])).name if int(found[1]) in set(signal.Signals) else ""
        if found := _SIGNAL_NAME.search(log.text):
            return found[1]
    return ""
