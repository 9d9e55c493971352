"""What every rank runs: `python -m launcher.rank_main runs/NAME` (direct: in the launcher's own process)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from common import logs, processes, rank_states, run_lock, run_status
from common.commands import set_resume_command
from common.environment import vccl
from common.errors import EXIT_INTERRUPTED, EXIT_RUN, PreflightError, ProjectError, UserError
from common.files import write_atomic
from common.rank_states import RankState
from common.rundir import RunDir, check_resumable
from common.spec import RunSpec
from launcher import batch_size, build, data_records, stages
from launcher.resume import newest_good_checkpoint
from launcher.sending import sending
from recipes.resolve import Resolved, resolve
from training import hang_watch, heartbeat, sigterm
from training.distributed.rank_env import RankInfo, clear_rank_variables, read_rank, set_torchrun_variables
from training.system_samples import SystemSampler

log = logging.getLogger("launch")
_DECISION_LIMIT_S = 1800.0  # rank 0 reads the whole checkpoint once


def train(folder: RunDir, resolved: Resolved, where: RankInfo | None = None, built: build.Built | None = None) -> int:
    """Build the configuration on the machine that trains it, unless the launcher's own process did, and train it.

    Rank 0 holds the run's lock from here on (common/run_lock.py).

    Args:
        folder: runs/NAME.
        resolved: what runs/NAME/spec.json comes to.
        where: this rank; not given, the only one.
        built: the launcher's, if this is the launcher's process.

    Returns:
        the exit code: 0, or 130 after Ctrl-C.

    Raises:
        ProjectError: anything the user can mend.
    """
    where = where or RankInfo()
    resolved = resolved.with_spec(attempt=resolved.spec.attempt + where.restarts)
    spec = resolved.spec
    set_resume_command(spec.resume_command)
    attempt = folder.attempt(spec.attempt)
    logs.log_to_file(attempt, where.rank)
    if "TORCH_NCCL_DUMP_ON_TIMEOUT" in os.environ:  # torch's flight recorder; watch/flight_recorder.py reads the files
        os.environ.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(attempt.absolute() / "nccl_trace_rank_"))
    if where.rank == 0:
        run_lock.acquire(folder.path, run_lock.RANK_0)
    with contextlib.ExitStack() as after, _recorded(folder, resolved, where):
        if library := vccl.check_mapped(vccl.asked_library(json.loads(folder.env.read_text()))):
            log.info("VCCL: %s (NCCL %s) is loaded in place of torch's NCCL", library.path, library.version)
        trains_here = not spec.elsewhere  # then the launcher has checked and logged what follows
        if not trains_here:
            if spec.resume:
                check_resumable(folder)
            resolved = _fit_batch(resolved, folder, where)
            if where.local_rank == 0:
                _check(resolved, folder)
        if built is None:
            built = build.build(resolved, folder, adapt_to_machine=True)
            for line in built.lines:
                log.log(logging.DEBUG if trains_here else logging.INFO, "%s", line)
        heartbeat.enter_phase(run_status.LOADING)
        _start_or_resume(built, folder, spec, where)
        if where.rank == 0:
            write_atomic(folder.config, build.to_yaml(built.partial))
            if not trains_here or spec.dryrun:  # a dry run that was started by hand afterwards
                data_records.write(built.partial, built.plan, folder)
            # it ends after the rank's last state is recorded
            after.enter_context(sending(folder, built.plan.loggers, spec.attempt))
        return _run_training(built, folder, spec, where)


def _fit_batch(resolved: Resolved, folder: RunDir, where: RankInfo) -> Resolved:
    """Choose the micro batch on the machine that trains; rank 0 records it, so that a resumed run keeps it.

    Every rank chooses for itself: nodes with GPUs of different sizes come to different configurations, which the
    ranks compare before the first step (training/distributed/consistency.py).
    """
    if resolved.spec.resume or folder.complete_checkpoints():
        return resolved
    fitted = batch_size.fit(resolved, folder, batch_size.gpus_of_this_machine(resolved.plan))
    if where.rank == 0 and fitted.spec != resolved.spec:
        write_atomic(folder.spec_file, dataclasses.replace(fitted.spec, attempt=folder.spec().attempt).to_json())
    return fitted


def _check(resolved: Resolved, folder: RunDir) -> None:
    """Preflight on the machine that trains, where the launcher could not look."""
    from launcher.preflight import check as preflight
    from launcher.preflight.room import RankGpu

    gpus = batch_size.gpus_of_this_machine(resolved.plan)
    gpu = None if gpus is None else RankGpu(gpus.gib, batch_size.implementation(resolved, gpus))
    if fatal := [f.problem.what for f in preflight.check(resolved.plan, folder, gpu=gpu) if f.fatal]:
        raise PreflightError("preflight on the machine that trains: " + "; ".join(fatal))


def _start_or_resume(built: build.Built, folder: RunDir, spec: RunSpec, where: RankInfo) -> None:
    """Continue from the newest good checkpoint if there is one: `resume`, or a job that was started again."""
    if where.rank == 0:
        for aside in folder.set_aside_unfinished():
            log.warning("resume: an unfinished checkpoint is set aside as %s; older ones are deleted", aside)
    if built.partial.resume.resume_from_path is not None:  # the launcher's process did it
        return
    if spec.validate:
        stages.set_stages(built.partial, built.plan, attempt=spec.attempt)
        build.validate_only(built.partial, folder, spec)
        return
    checkpoint = _agreed_checkpoint(folder, folder.attempt(spec.attempt) / "resume-from", where)
    if checkpoint is not None:
        build.resume_from(built, folder, checkpoint, spec)
        return
    stages.set_stages(built.partial, built.plan, attempt=spec.attempt)
    if built.partial.resume.base:
        from launcher.base_model import start_from_base

        start_from_base(built.partial, folder, built.plan, write=where.rank == 0)


def _agreed_checkpoint(folder: RunDir, decision: Path, where: RankInfo) -> Path | None:
    """The checkpoint that all ranks continue from, or None. The launcher or rank 0 has checked its files and named it.

    Raises:
        UserError: every checkpoint is damaged.
        ProjectError: rank 0 named none in time.
    """
    end = time.monotonic() + _DECISION_LIMIT_S
    while time.monotonic() < end:
        words = decision.read_text().split() if decision.is_file() else []
        if words[:1] == [str(where.restarts)]:
            return folder.checkpoints / words[1] if len(words) > 1 else None
        if where.rank == 0:
            found = newest_good_checkpoint(folder)
            write_atomic(decision, f"{where.restarts} {found.name if found else ''}\n")
        else:
            time.sleep(0.2)
    raise ProjectError(
        "rank 0 has not said which checkpoint the run continues from",
        expected=f"{decision} within {_DECISION_LIMIT_S:.0f} s",
        found="no such file",
        do="look at rank 0's log, and whether all nodes see the same run directory",
    )


def _run_training(built: build.Built, folder: RunDir, spec: RunSpec, where: RankInfo) -> int:
    """Call NeMo, and record how this rank ended.

    Returns:
        the exit code: 0, or 130 after Ctrl-C.
    """
    import nemo_run as run

    from training import evaluation
    from training.distributed.consistency import record_run_facts
    from training.distributed.lost_ranks import explain_failed_collectives
    from training.interrupt import Interrupted

    attempt = folder.attempt(spec.attempt)
    record_run_facts(build.to_yaml(built.partial), data_records.manifests(built.partial))
    try:
        with explain_failed_collectives(heartbeat.record_failure):
            run.run(built.partial, direct=True)
    except Interrupted:
        return _stopped(folder, spec, where, together=True)
    except KeyboardInterrupt:
        return _stopped(folder, spec, where, together=False)
    except SystemExit as stop:  # Lightning's way out of a Ctrl-C inside a step
        if not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        return _stopped(folder, spec, where, together=False)
    if where.rank == 0 and not spec.validate:
        log.info("checkpoint: %s", folder.complete_checkpoints()[-1])
        log.info("logs:       %s", attempt)
        log.info("metrics:    %s", folder.metrics)
        log.info("curve:      tensorboard --logdir %s", folder.tensorboard)
    if built.plan.evaluate_every_n_steps and not spec.validate:
        hang_watch.stop()  # an evaluation has a limit of its own
        heartbeat.enter_phase(run_status.EVALUATING)  # the end comes after the results: loggers stop at the end
        if where.rank == 0:
            evaluation.finish()
        else:
            evaluation.wait_for_rank_0(attempt, built.partial.evaluate.minutes)
        hang_watch.start(heartbeat.record_failure)
    heartbeat.end(RankState(rank=where.rank, state=rank_states.DONE), attempt)
    _wait_for_all()
    hang_watch.stop()
    return 0


def _stopped(folder: RunDir, spec: RunSpec, where: RankInfo, *, together: bool) -> int:
    if where.rank == 0:
        what = f"resume with: {spec.resume_command}" if folder.complete_checkpoints() else "there is no checkpoint yet"
        log.warning("stopped; %s", what)
    state = RankState(rank=where.rank, state=rank_states.INTERRUPTED, exit_code=EXIT_INTERRUPTED)
    heartbeat.end(state, folder.attempt(spec.attempt))
    if together:
        _wait_for_all()
    return EXIT_INTERRUPTED


def _wait_for_all() -> None:
    """Leave only when every rank has recorded how it ended: torchrun and mpirun kill the others once one has left."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.barrier()


@contextlib.contextmanager
def _recorded(folder: RunDir, resolved: Resolved, where: RankInfo) -> Iterator[None]:
    """Start this rank's heartbeat and its node's system samples; record how the rank ended."""
    spec, attempt = resolved.spec, folder.attempt(resolved.spec.attempt)
    status = run_status.RunStatus(
        phase=run_status.IMPORTING,
        executor=spec.executor or "",
        attempt=spec.attempt,
        world_size=where.world_size,
        step=folder.newest_step(),
        max_steps=resolved.plan.max_steps,
    )
    heartbeat.start(folder, where.rank, status)
    hang_watch.start(heartbeat.record_failure)
    samples = SystemSampler(folder, spec.attempt, where.rank // where.local_world_size)
    if where.local_rank == 0:
        samples.start()
    try:
        yield
    except KeyboardInterrupt:
        heartbeat.end(RankState(rank=where.rank, state=rank_states.INTERRUPTED, exit_code=EXIT_INTERRUPTED), attempt)
        raise
    except (Exception, SystemExit) as error:
        code = error.exit_code if isinstance(error, ProjectError) else EXIT_RUN
        text = error.explain() if isinstance(error, ProjectError) else traceback.format_exc()
        logging.getLogger("rank").info("failed:\n%s", text)
        heartbeat.end(RankState(rank=where.rank, state=rank_states.FAILED, exit_code=code, error=text), attempt)
        raise
    finally:
        samples.stop()
        hang_watch.stop()


def _set_up_rank(folder: RunDir) -> tuple[Resolved, RankInfo]:
    """Set the run's environment, read this process's rank, and set torchrun's variables for every library.

    Raises:
        UserError: torchrun, mpirun or srun started another number of ranks than the run was written for.
    """
    spec = folder.spec()
    rows = json.loads(folder.env.read_text())
    vccl.start_again_with_vccl(vccl.asked_library(rows), os.environ)
    for row in rows:  # what the executor or the node has set wins: devices, network
        if row["key"] not in vccl.PRELOADS:  # no longer read
            os.environ.setdefault(row["key"], row["value"])
    resolved = resolve(spec)
    plan = resolved.plan
    if spec.executor == "direct":
        clear_rank_variables(os.environ)
        return resolved, RankInfo()
    where = read_rank(os.environ, plan.devices)
    if where.world_size != plan.world_size:
        raise UserError(
            "another number of ranks than the run was written for",
            expected=f"{plan.world_size} = {plan.num_nodes} node(s) x {plan.devices} device(s)",
            found=f"{where.world_size} from {where.started_by}",
            do=f"start {plan.world_size}, or write the run anew with --devices and --nodes",
        )
    set_torchrun_variables(os.environ, where)
    return resolved, where


def _watch_starters(folder: RunDir) -> None:
    """Save and stop when what started this rank is gone."""

    def stop(what: str) -> None:
        log.warning("%s is gone: saving and stopping", what)
        os.kill(os.getpid(), signal.SIGTERM)

    processes.watch(processes.starters(), lambda pid: stop(f"process {pid}, which started this rank,"))
    if not os.environ.get(processes.LAUNCHER_OUTSIDE):
        return
    if not run_lock.watch_launcher(folder.path, lambda: stop("the launcher outside this container")):
        log.warning("the launcher's lock is not seen in here: if the launcher is killed, the container goes on")


def main(argv: list[str]) -> int:
    """One rank from start to end.

    Returns:
        its exit code.
    """
    processes.interrupt_on_stop_signals()
    folder = RunDir.at(argv[0])
    try:
        if folder.spec().executor == "slurm":
            sigterm.block()
        resolved, where = _set_up_rank(folder)
        logs.log_to_console(where.rank, folder.attempt(resolved.spec.attempt + where.restarts) / "console.log")
        _watch_starters(folder)
        return train(folder, resolved, where)
    except ProjectError as error:
        print(f"error: {error.explain()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        sigterm.kill_children()


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
