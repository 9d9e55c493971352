"""Keeps runs/NAME/status.json right around an executor's `submit`: the start, the end, and why a run failed."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from common import rank_states, run_status
from common.errors import EXIT_INTERRUPTED, EXIT_RUN, DiagnosedError, ProjectError
from common.run_status import Ending, RunStatus, read_status
from common.rundir import RunDir
from launcher.executor_table import EXECUTORS
from launcher.executors import Job

log = logging.getLogger("launch")
ExplainFailure = Callable[[RunDir, int], Ending]  # the run and its exit code


def submit_and_record(submit: Callable[[Job], int], job: Job, explain_failure: ExplainFailure | None) -> int:
    """Start the job and wait as the executor does; write status.json before and after.

    Returns:
        the executor's exit code.

    Raises:
        DiagnosedError: instead of a library's error whose cause is known.
    """
    assert job.resolved is not None
    if job.dryrun:
        return submit(job)
    spec, plan = job.resolved.spec, job.resolved.plan
    start = RunStatus(executor=spec.executor or "", attempt=spec.attempt, world_size=job.world_size)
    start = dataclasses.replace(start, step=job.folder.newest_step(), max_steps=plan.max_steps)
    start.write(job.folder.status)
    try:
        code = submit(job)
    except KeyboardInterrupt:
        _write_end(job, run_status.INTERRUPTED, Ending(exit_code=EXIT_INTERRUPTED))
        raise
    except ProjectError as error:
        ending = Ending(exit_code=error.exit_code, summary=error.what, advice=error.do, error=error.explain())
        _write_end(job, run_status.FAILED, ending)
        raise
    except Exception as error:
        ending = _explain(job, EXIT_RUN, explain_failure)
        _write_end(job, run_status.FAILED, ending)
        if not ending.cause:
            raise
        raise DiagnosedError(ending.summary, found=_last_line(ending.error), do=ending.advice) from error
    _record_return(job, code, explain_failure)
    return code


def record_complete(folder: RunDir) -> None:
    """Write that the run is done: it was stopped after its last checkpoint and before it could say so."""
    status = read_status(folder.status)
    if status is not None and status.phase != run_status.DONE:
        dataclasses.replace(status, phase=run_status.DONE, step=status.max_steps, ending=Ending()).write(folder.status)


def _record_return(job: Job, code: int, explain_failure: ExplainFailure | None) -> None:
    """Write how the attempt ended, unless it goes on without this launcher or rank 0 has written it."""
    assert job.resolved is not None
    queued = EXECUTORS[job.resolved.spec.executor or "direct"].on_cluster  # the launcher may end before the job
    waited = not queued or (job.cluster is not None and job.cluster.wait)
    if code == 0 and waited:
        _write_end(job, run_status.DONE, Ending())
    elif code == EXIT_INTERRUPTED and not queued:
        _write_end(job, run_status.INTERRUPTED, Ending(exit_code=code))
    elif code not in (0, EXIT_INTERRUPTED):
        ending = _explain(job, code, explain_failure)
        _write_end(job, run_status.FAILED, ending)
        for line in (ending.summary, ending.advice and f"do this: {ending.advice}"):
            if line:
                log.error("diagnosis: %s", line)


def _explain(job: Job, code: int, explain_failure: ExplainFailure | None) -> Ending:
    """What the diagnosis says; without one, what the first failing rank said."""
    if explain_failure is not None:
        return explain_failure(job.folder, code)
    first = rank_states.first_failure(rank_states.read(job.logs))
    if first is None:
        return Ending(exit_code=code)
    return Ending(exit_code=code, rank=first.rank, host=first.host, error=first.error, summary=_last_line(first.error))


def _write_end(job: Job, phase: str, ending: Ending) -> None:
    status = read_status(job.folder.status)
    if status is None or (phase == status.phase == run_status.DONE):
        return
    try:
        ended = dataclasses.replace(status, phase=phase, ending=ending, updated=ending.time)
        ended.write(job.folder.status)
        if job.logs.is_dir():
            ended.write(job.logs / "status.json")  # the next attempt replaces the run's own
    except OSError as problem:
        log.warning("status: cannot write %s: %s", job.folder.status, problem)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
