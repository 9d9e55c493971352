"""From a RunSpec to a started run: resolve, set the environment, check, write, hand over to an executor."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from common import logs, processes, rundir
from common.environment.merge import Setting, Site, apply_environment, complete_name, restart_with_preloads
from common.environment.sets import BACKEND_KEY
from common.environment.shell import shell_settings
from common.errors import EXIT_PREFLIGHT, UserError
from common.files import write_atomic
from common.rundir import RunDir
from common.spec import RunSpec
from launcher import batch_size, build, data_records, executor_table, executors, resume, run_file
from launcher.claim import claim_run_directory
from launcher.executors import Job
from launcher.executors.on_cluster import check_size
from launcher.launcher_log import LauncherLog, keep_launcher_log
from launcher.load_cluster import load_cluster, with_layers
from launcher.outcome import ExplainFailure, record_complete, submit_and_record
from launcher.preflight import check as preflight
from launcher.preflight.findings import Finding
from launcher.preflight.room import RankGpu
from launcher.resume import newest_good_checkpoint
from launcher.retries import Retries
from launcher.stages import check_change_blend
from recipes import profiles
from recipes.plan import Plan
from recipes.resolve import Resolved, changes, continue_run, resolve
from training.distributed import rank_env

if TYPE_CHECKING:
    import nemo_run as run

    from launcher.cluster_file import Cluster

log = logging.getLogger("launch")
_SEVERAL_NODES = "--executor slurm --cluster docs/clusters/slurm.yaml, or the executor k8s or mpirun (docs/clusters.md)"


def launch(asked: RunSpec | Resolved, explain_failure: ExplainFailure | None = None) -> int:
    """Do what the spec says.

    Args:
        asked: a spec; resolved already where its length is counted in epochs.
        explain_failure: reads the run directory of a failed run and says why it failed (watch/diagnose.py).

    Returns:
        the exit code: 0, 3 after a failed preflight, 130 after Ctrl-C, the first failing rank's own.

    Raises:
        ProjectError: anything the user can mend; its exit_code is the command's.
    """
    logs.log_to_console()
    spec = asked.spec if isinstance(asked, Resolved) else asked
    check_change_blend(spec.change_blend, spec.resume)
    processes.interrupt_on_stop_signals()  # until something else handles them: training, or the wait for the ranks
    retries, environ = Retries(), dict(os.environ)
    with claim_run_directory(spec) as folder, keep_launcher_log() as launcher_log:
        code = _launch(asked, folder, launcher_log, explain_failure)
        while not spec.dryrun and (again := retries.next_spec(folder, code)):
            launcher_log.path = None
            os.environ.clear()  # of what the first attempt set: a retry records who set what, too
            os.environ.update(environ)
            code = _launch(again, folder, launcher_log, explain_failure, is_retry=True)
        return code


def _launch(
    asked: RunSpec | Resolved,
    folder: RunDir,
    launcher_log: LauncherLog,
    explain_failure: ExplainFailure | None,
    *,
    is_retry: bool = False,
) -> int:
    """One attempt; the lines of a retry would repeat those of the first."""
    spec = asked.spec if isinstance(asked, Resolved) else asked
    resolved = _choose_executor(_with_recorded(asked, folder) if spec.resume else resolve(asked))
    executor = resolved.spec.executor or "direct"
    submit, cluster = executors.resolve(executor), _load_cluster(resolved.spec)
    check_size(cluster, resolved.plan.num_nodes, resolved.plan.devices, executor)
    executors.check(executor, _job(resolved, resolved.plan, folder, [], cluster))
    trains_here = executor_table.trains_here(executor, cluster)
    resolved = resolved.with_spec(elsewhere=not trains_here)
    sees_run = executor_table.shares_run_folder(executor, cluster)
    if spec.resume and sees_run:
        rundir.check_resumable(folder)
        if (done := resume.describe_if_complete(folder, resolved.plan)) is not None:
            log.info("%s", done)
            if not spec.dryrun:
                record_complete(folder)
                return 0
    settings = _set_environment(resolved, cluster)
    resolved = resolved.with_spec(process_group_backend=os.environ.get(BACKEND_KEY))
    gpus = _known_gpus(resolved.plan, cluster, trains_here)
    resolved = batch_size.fit(resolved, folder, gpus, trains_elsewhere=not trains_here)
    before = len(folder.attempts) if sees_run or not spec.resume else folder.spec().attempt
    resolved = resolved.with_spec(name=folder.name, attempt=before + 1)
    if not is_retry:
        _log_run(resolved, folder, settings)
    gpu = None if gpus is None else RankGpu(gpus.gib, batch_size.implementation(resolved, gpus))
    findings = _preflight(resolved.plan, folder, resolved.spec, cluster, gpu)
    fit_to_start = not findings
    if findings and (not spec.dryrun or any(finding.in_numbers for finding in findings)):
        return EXIT_PREFLIGHT
    if spec.dryrun and not findings and executor_table.shares_files(executor, cluster):
        data_records.log_blend(resolved.plan)
    with stdout_is_stderr() as stdout:
        built = build.build(resolved, folder, adapt_to_machine=trains_here)
        for line in () if is_retry else built.lines:
            log.info("%s", line)
        changed = built.plan != resolved.plan  # by the body of the recipe's function
        fit_to_start = fit_to_start and not (changed and _preflight(built.plan, folder, resolved.spec, cluster, gpu))
        if not fit_to_start and not spec.dryrun:
            return EXIT_PREFLIGHT
        text = _write(resolved.spec, built, folder, settings, cluster)
        if spec.dryrun:
            _check_learning_rate(built.partial, folder if spec.write else None)
            stdout.write(text)
    job = _job(resolved, built.plan, folder, settings, cluster, built)
    launcher_log.path = job.logs / "launcher.log"
    code = submit_and_record(submit, job, explain_failure)
    return code if fit_to_start else EXIT_PREFLIGHT


def _known_gpus(plan: Plan, cluster: Cluster | None, trains_here: bool) -> batch_size.Gpus | None:
    """The GPUs that the run will have, where this machine can tell: its own, or what the cluster file says."""
    if trains_here:
        return batch_size.gpus_of_this_machine(plan)
    if cluster is None or cluster.gpu_memory_gib is None:
        return None
    log.info("batch: for GPUs of %g GiB (gpu_memory_gib of the cluster file)", cluster.gpu_memory_gib)
    return batch_size.Gpus(cluster.gpu_memory_gib)


def _with_recorded(asked: RunSpec | Resolved, folder: RunDir) -> Resolved:
    """What a resumed run was started with, and what the user asks for now; each changed number is logged."""
    recorded = resolve(folder.spec())
    continued = continue_run(recorded, asked).with_spec(name=folder.name)
    for line in changes(recorded.plan, continued.plan):
        log.info("resume with a change: %s", line)
    return continued


def _choose_executor(resolved: Resolved) -> Resolved:
    """The run with the executor that the user left open.

    Raises:
        UserError: several ranks for `direct`, or several nodes for an executor that starts ranks on one machine.
    """
    plan = resolved.plan
    if resolved.spec.executor is None:
        name = "direct" if plan.world_size == 1 else "local"
        log.info("executor %s: the recipe has %d rank(s)", name, plan.world_size)
        resolved = resolved.with_spec(executor=name)
    executor = resolved.spec.executor or ""
    executor_table.check(executor, resolved.spec.cluster)
    if executor == "direct" and plan.world_size > 1:
        raise UserError(
            "direct is one process",
            expected="trainer.devices=1 trainer.num_nodes=1",
            found=f"{plan.num_nodes} node(s) x {plan.devices} device(s)",
            do="--executor local" if plan.num_nodes == 1 else _SEVERAL_NODES,
        )
    if executor == "local" and plan.num_nodes > 1:
        raise UserError(
            "local is one machine",
            expected="trainer.num_nodes=1",
            found=f"{plan.num_nodes} nodes",
            do=_SEVERAL_NODES,
        )
    return resolved


def _set_environment(resolved: Resolved, cluster: Cluster | None) -> list[Setting]:
    """Apply the run's environment set to this process; start again if a library must be loaded before all others."""
    spec, plan = resolved.spec, resolved.plan
    if spec.executor == "direct" and (dropped := rank_env.clear_rank_variables(os.environ)):
        log.info("direct: one process; %s of the job around it are not read", ", ".join(dropped))
    before = dict(os.environ)
    name = with_layers(complete_name(spec.env, plan.environment_set), cluster)
    site = Site(cluster.env if cluster else {}, spec.cluster or "", elsewhere=spec.elsewhere)
    settings = apply_environment(name, os.environ, plan, site)
    same_files = executor_table.shares_files(spec.executor, cluster)
    settings += shell_settings(before, settings, same_files=same_files, same_machine=not spec.elsewhere)
    if spec.executor == "direct" and not spec.dryrun:
        restart_with_preloads(settings, before)
    return settings


def _load_cluster(spec: RunSpec) -> Cluster | None:
    return load_cluster(spec.cluster) if spec.cluster is not None else None


def _job(
    resolved: Resolved,
    plan: Plan,
    folder: RunDir,
    settings: list[Setting],
    cluster: Cluster | None,
    built: build.Built | None = None,
) -> Job:
    """The run as its executor gets it; without `built` only to be checked."""
    spec = resolved.spec
    return Job(
        folder=folder,
        logs=folder.attempt(spec.attempt),
        env={setting.key: setting.value for setting in settings},
        devices=plan.devices,
        num_nodes=plan.num_nodes,
        accelerator=plan.accelerator,
        cluster=cluster,
        dryrun=spec.dryrun,
        rank_command=("python", "-m", "launcher.rank_main", str(folder.path)),
        resume_command=spec.resume_command,
        resolved=resolved,
        built=built,
    )


def _write(spec: RunSpec, built: build.Built, folder: RunDir, settings: list[Setting], cluster: Cluster | None) -> str:
    """Everything the ranks read; returns the resolved configuration. A dry run of a resume leaves the run alone.

    What needs the corpora is left to the ranks where this machine does not have them: the checks of a resumed run,
    data.json and blend.json.
    """
    if spec.resume and executor_table.shares_files(spec.executor, cluster):
        _resume(built, folder, spec)
    text = build.to_yaml(built.partial)
    if spec.resume and spec.dryrun:
        return text
    folder.write(spec, text, settings, [sys.executable, *sys.argv])
    write_atomic(folder.run_file, run_file.dump(spec))
    if not spec.elsewhere and not spec.dryrun:
        data_records.write(built.partial, built.plan, folder)
    if spec.dryrun:
        log.info("dry run: trained nothing%s", f"; written: {folder.path}" if spec.write else "")
    return text


def _resume(built: build.Built, folder: RunDir, spec: RunSpec) -> None:
    """Choose the checkpoint, for this process and for the ranks that it starts. A dry run changes no checkpoint."""
    if spec.dryrun:
        build.resume_from(built, folder, folder.complete_checkpoints()[-1], spec)
    elif (checkpoint := newest_good_checkpoint(folder)) is not None:
        build.resume_from(built, folder, checkpoint, spec)
        write_atomic(folder.attempt(spec.attempt) / "resume-from", f"0 {checkpoint.name}\n")


def _log_run(resolved: Resolved, folder: RunDir, settings: list[Setting]) -> None:
    """What will run and where, and every automatically chosen value with its reason."""
    spec, plan = resolved.spec, resolved.plan
    log.info("run %s: recipe %s, %s executor", folder.path, spec.recipe, spec.executor)
    log.info("ranks: %d = %d node(s) x %d device(s)", plan.world_size, plan.num_nodes, plan.devices)
    log.info("model: %s parameters (%.1fM)", f"{plan.shape.num_parameters:,}", plan.shape.num_parameters / 1e6)
    log.info(
        "batch: %d tokens per step = global batch %d (micro batch %d x data parallel %d x %d accumulated) x %d tokens",
        *(plan.tokens_per_step, plan.global_batch_size, plan.micro_batch_size, plan.data_parallel),
        *(plan.num_micro_batches, plan.seq_length),
    )
    if spec.tokens is not None:
        tokens = plan.max_steps * plan.tokens_per_step
        log.info("length: %d steps = %s tokens (--tokens %s)", plan.max_steps, f"{tokens:,}", f"{spec.tokens:,}")
    if plan.profile is not None:
        for line in profiles.reasons(plan.profile, plan.learning_rate(), plan.max_steps):
            log.info("%s", line)
    for s in settings:
        log.info("env %s=%s (%s: %s)", s.key, s.value, s.source, "kept as it was" if s.source == "user" else s.reason)


def _check_learning_rate(partial: run.Partial, folder: RunDir | None) -> None:
    """Check the schedule that the recipe's function has built; draw it as lr.png in a folder that is kept."""
    import fiddle as fdl

    from recipes.build.lr_slot import StepSchedule
    from recipes.curve import plot

    slot = fdl.build(partial.optim.lr_scheduler)
    if not isinstance(slot, StepSchedule) or partial.trainer.max_steps < 1:
        return
    curve = slot.schedule(partial.optim.config.lr)
    if folder is not None:
        plot(curve, partial.trainer.max_steps, folder.path / "lr.png")


def _preflight(
    plan: Plan, folder: RunDir, spec: RunSpec, cluster: Cluster | None, gpu: RankGpu | None
) -> list[Finding]:
    """The errors that can be found on this machine; the ranks check the rest where they run."""
    data = executor_table.shares_files(spec.executor, cluster)
    found = preflight.check(plan, folder, machine=not spec.elsewhere, data=data, gpu=gpu)
    return [finding for finding in found if finding.fatal]


@contextlib.contextmanager
def stdout_is_stderr() -> Iterator[TextIO]:
    """Send what libraries print to standard error, so that a dry run's standard output is YAML alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(kept, "w") as stdout:
        try:
            yield stdout
        finally:
            sys.stdout.flush()
            stdout.flush()
            os.dup2(kept, 1)
