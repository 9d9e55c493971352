"""From a RunSpec to a finished run: resolve, set the environment, check, write, train."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from data.blend import chosen
from data.manifest import FILE_NAME
from ops import preflight
from recipes import overrides, registry
from recipes.plan import Plan
from runtime import env, logs, resume, rundir
from runtime.errors import EXIT_INTERRUPTED, EXIT_PREFLIGHT, ProjectError, UserError
from runtime.rundir import RunDir
from runtime.spec import RunSpec

if TYPE_CHECKING:
    import nemo_run as run

log = logging.getLogger("launch")
EXECUTORS = ("direct",)


def launch(spec: RunSpec) -> int:
    """Do what the spec says.

    Returns:
        the exit code: 0, 3 after a failed preflight, 130 after Ctrl-C.

    Raises:
        ProjectError: anything the user can mend; its exit_code is the command's.
    """
    logs.console()
    if spec.executor not in EXECUTORS:
        raise UserError(
            f"unknown executor {spec.executor!r}",
            expected="one of " + ", ".join(EXECUTORS),
            found=repr(spec.executor),
            do="--executor direct",
        )
    recipe = registry.resolve(spec.recipe)
    plan = overrides.early(recipe.plan, spec.overrides)
    folder = rundir.choose(spec)
    settings = env.apply(spec.env or plan.env, os.environ)
    _tell(spec, plan, folder, settings)
    if not _preflight(plan, folder) and not spec.dryrun:
        return EXIT_PREFLIGHT
    with _stdout_is_stderr() as stdout:
        partial = recipe()
        from recipes import machine

        logs.quiet_nemo()
        for line in machine.adapt(partial):
            log.info("this machine: %s", line)
        for line in overrides.apply(partial, spec.overrides):
            log.info("override %s", line)
        resolved = plan.as_resolved(partial)
        if resolved != plan and not _preflight(resolved, folder) and not spec.dryrun:
            return EXIT_PREFLIGHT
        _attach(partial, folder)
        text = _yaml(partial)
        if spec.resume:
            text = _resume(partial, folder, text, resolved, spec)
        elif partial.resume.base and not spec.dryrun:
            text = _start(partial, folder, resolved)
        if spec.resume and spec.dryrun:
            stdout.write(text)
            return 0
        folder.write(spec, text, settings, [sys.executable, *sys.argv])
        if resolved.blend is not None and not spec.dryrun:
            _plan_blend(resolved, folder)
        folder.data.write_text(json.dumps(_manifests(partial)) + "\n")
        if spec.dryrun:
            _picture(partial, folder)
            log.info("dry run: wrote %s, trained nothing", folder.path)
            stdout.write(text)
            return 0
    return _direct(partial, folder, spec)


def _tell(spec: RunSpec, plan: Plan, folder: RunDir, settings: list[env.Setting]) -> None:
    """What will run, where, and every automatically chosen value with its reason."""
    log.info("run %s: recipe %s, %s executor", folder.path, spec.recipe, spec.executor)
    log.info("model: %s parameters (%.1fM)", f"{plan.shape.num_parameters:,}", plan.shape.num_parameters / 1e6)
    log.info(
        "batch: %d tokens a step = global batch %d (micro batch %d x data parallel %d x %d accumulated) x %d tokens",
        plan.tokens_per_step,
        plan.global_batch_size,
        plan.micro_batch_size,
        plan.data_parallel,
        plan.global_batch_size // max(1, plan.micro_batch_size * plan.data_parallel),
        plan.seq_length,
    )
    for s in settings:
        log.info("env %s=%s (%s: %s)", s.key, s.value, s.source, "kept as it was" if s.source == "user" else s.reason)


def _picture(partial: run.Partial, folder: RunDir) -> None:
    """Draw the learning-rate curve of the whole run (also checks its parameters)."""
    import fiddle as fdl

    from recipes.curve import plot
    from recipes.lr import StepSchedule

    slot = fdl.build(partial.optim.lr_scheduler)
    if isinstance(slot, StepSchedule) and partial.trainer.max_steps > 0:
        plot(slot.schedule(partial.optim.config.lr), partial.trainer.max_steps, folder.path / "lr.png")


def _preflight(plan: Plan, folder: RunDir) -> bool:
    findings = preflight.check(plan, folder)
    for finding in findings:
        log.log(logging.ERROR if finding.fatal else logging.WARNING, "%s", finding.problem)
    return not any(finding.fatal for finding in findings)


def _attach(partial: run.Partial, folder: RunDir) -> None:
    """Give the recipe the run directory's paths."""
    partial.log.explicit_log_dir = str(folder.next_attempt / "nemo")
    partial.log.ckpt.dirpath = str(folder.checkpoints)
    partial.log.tensorboard.save_dir = str(folder.path)


def _resume(partial: run.Partial, folder: RunDir, text: str, plan: Plan, spec: RunSpec) -> str:
    """Point the recipe at the newest whole checkpoint, if what changed since allows it.

    Returns:
        the resolved configuration with the checkpoint in it.
    """
    import nemo_run as run
    import yaml
    from nemo import lightning as nl

    if not spec.dryrun:
        for aside in folder.set_aside_unfinished():
            log.warning("resume: an unfinished checkpoint is set aside as %s (it can be deleted)", aside)
    checkpoint = folder.whole_checkpoints()[-1]
    before = yaml.safe_load((checkpoint / "run" / "config.yaml").read_text())
    for line in resume.check(before, yaml.safe_load(text), checkpoint):
        log.info("changed since the checkpoint: %s", line)
    resume.check_data(folder, _manifests(partial))
    resume.check_order(before, plan, partial.data.train_steps)
    partial.resume.resume_from_path = str(checkpoint)
    if folder.base.exists():  # where the weights came from at first: export takes the model's files from there
        origin = json.loads(folder.base.read_text())["checkpoint"]
        partial.resume.restore_config = run.Config(
            nl.RestoreConfig, path=origin, load_optim_state=False, load_artifacts=False
        )
    log.info("resume: from %s, weights, optimizer state and data position", checkpoint)
    return _yaml(partial)


def _start(partial: run.Partial, folder: RunDir, plan: Plan) -> str:
    """Start from the recipe's base model; returns the resolved configuration with the imported checkpoint in it."""
    from runtime.base import start_from_base

    start_from_base(partial, folder, plan)
    return _yaml(partial)


def _plan_blend(plan: Plan, folder: RunDir) -> None:
    """Say what the blend comes to over the whole run, and keep it for the report."""
    assert plan.blend is not None
    trained, _ = chosen(plan.blend, plan.replay_share, plan.max_steps * plan.tokens_per_step)
    for line in trained.table():
        log.info("blend: %s", line)
    folder.blend.write_text(trained.to_json())


def _manifests(partial: run.Partial) -> dict[str, object]:
    """folder -> manifest.json of every prepared corpus the run reads."""
    if partial.data.blend is not None:
        try:
            folders = list(chosen(partial.data.blend, partial.data.replay_share)[1].values())
        except ProjectError:  # told by preflight; only a dry run comes here
            return {}
    else:
        folders = [partial.data.paths] if isinstance(partial.data.paths, str) else []
    found = [Path(folder) for folder in folders if (Path(folder) / FILE_NAME).is_file()]
    return {str(folder): json.loads((folder / FILE_NAME).read_text()) for folder in found}


def _yaml(partial: run.Partial) -> str:
    import yaml
    from nemo_run.core.serialization.yaml import YamlSerializer

    def name_of(dumper: yaml.SafeDumper, kind: type) -> yaml.Node:
        return dumper.represent_data({"_target_": f"{kind.__module__}.{kind.__qualname__}", "_call_": False})

    yaml.SafeDumper.add_multi_representer(type, name_of)  # NeMo-Run writes functions this way, but no classes
    return str(YamlSerializer().serialize(partial))


def _direct(partial: run.Partial, folder: RunDir, spec: RunSpec) -> int:
    """Train in this process."""
    import nemo_run as run

    from runtime.interrupt import Interrupted

    logs.to_file(folder.next_attempt)
    how_to_resume = f"python launch.py --recipe {spec.recipe} --name {folder.name} --resume"
    try:
        run.run(partial, direct=True)
    except SystemExit as stop:  # Lightning's way out of a Ctrl-C inside a step
        if not isinstance(stop.__context__, KeyboardInterrupt):
            raise
        return _interrupted(folder, how_to_resume)
    except (Interrupted, KeyboardInterrupt):
        return _interrupted(folder, how_to_resume)
    log.info("checkpoint: %s", folder.whole_checkpoints()[-1])
    log.info("logs:       %s", folder.attempts[-1])
    log.info("metrics:    %s", folder.metrics)
    log.info("curve:      tensorboard --logdir %s", folder.tensorboard)
    return 0


def _interrupted(folder: RunDir, how_to_resume: str) -> int:
    whole = folder.whole_checkpoints()
    log.warning("stopped by Ctrl-C; %s", f"resume with: {how_to_resume}" if whole else "there is no checkpoint yet")
    return EXIT_INTERRUPTED


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[TextIO]:
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
