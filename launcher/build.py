"""From a resolved spec to the configuration that trains: the same in the launcher and in every rank."""

from __future__ import annotations

import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.load_nemo import load_nemo
from common.rundir import RunDir
from common.small_files import parse_yaml, read_small_file
from common.spec import RunSpec
from launcher import data_records, resume, stages
from recipes.overrides import apply_to_recipe
from recipes.plan import Plan
from recipes.resolve import Resolved

if TYPE_CHECKING:
    import nemo_run as run

log = logging.getLogger("launch")


@dataclass(frozen=True)
class Built:
    """A resolved recipe: the Partial, the plan it comes to, and what was changed on the way, for the log."""

    partial: run.Partial
    plan: Plan
    lines: tuple[str, ...]


def build(resolved: Resolved, folder: RunDir, *, adapt_to_machine: bool) -> Built:
    """The configuration of the plan, with this machine's changes, the overrides and the run directory's paths.

    Args:
        adapt_to_machine: this machine trains, so that its GPU and libraries decide the speed levers.

    Raises:
        UserError: an override that the recipe does not take.
    """
    load_nemo()
    from recipes.build import adapt, collectives

    plan, recipe = resolved.plan, resolved.recipe
    partial = recipe.build(plan)
    lines = [f"this machine: {line}" for line in (adapt.adapt(partial) if adapt_to_machine else [])]
    lines += [f"environment: {line}" for line in collectives.adapt(partial, plan)]
    lines += [f"override {line}" for line in apply_to_recipe(partial, resolved.overrides, recipe.plan)]
    collectives.check(partial)
    if not resolved.spec.gates:
        lines.append(leave_gates_out(partial))
    set_run_directory(partial, folder, resolved.spec.attempt)
    return Built(partial, plan.as_resolved(partial), tuple(lines))


def leave_gates_out(partial: run.Partial) -> str:
    """Take the truth gates from the callbacks (--no-gates); returns the line that says so."""
    import fiddle

    from training.gates import TruthGates

    callbacks = partial.trainer.callbacks
    partial.trainer.callbacks = [one for one in callbacks if fiddle.get_callable(one) is not TruthGates]
    return "--no-gates: nothing checks that the run trains what its recipe says, and its passport will say so"


def set_run_directory(partial: run.Partial, folder: RunDir, attempt: int) -> None:
    """Set every path of the run on the recipe, and `run_dir` on each callback whose constructor takes one."""
    import fiddle

    partial.log.explicit_log_dir = str(folder.attempt(attempt) / "nemo")
    partial.log.ckpt.dirpath = str(folder.checkpoints)
    partial.log.tensorboard.save_dir = str(folder.path)
    own = getattr(partial, "evaluate", None)
    for callback in (partial.log.ckpt, *partial.trainer.callbacks, *([own] if own is not None else [])):
        if "run_dir" in inspect.signature(fiddle.get_callable(callback)).parameters:
            callback.run_dir = str(folder.path)


def resume_from(built: Built, folder: RunDir, checkpoint: Path, spec: RunSpec) -> None:
    """Point the recipe at a checkpoint of the run.

    Args:
        spec: of this attempt.

    Raises:
        UserError: what changed since then does not allow it.
    """
    import nemo_run as run
    import yaml
    from nemo import lightning as nl

    partial = built.partial
    before = parse_yaml(read_small_file(checkpoint / "run" / "config.yaml"))
    now = yaml.safe_load(to_yaml(partial))
    for line in resume.check(before, now, checkpoint, change_blend=spec.change_blend):
        log.info("changed since the checkpoint: %s", line)
    resume.check_data(folder, data_records.manifests(partial))
    stages.set_stages(partial, built.plan, attempt=spec.attempt, checkpoint=checkpoint, change_blend=spec.change_blend)
    if not stages.in_ledger_order(partial):
        resume.check_order(before, built.plan, partial.data.train_steps)
    partial.resume.resume_from_path = str(checkpoint)
    if folder.base.exists():  # the base model: an export takes tokenizer and config files from there
        origin = json.loads(folder.base.read_text())["checkpoint"]
        partial.resume.restore_config = run.Config(
            nl.RestoreConfig, path=origin, load_optim_state=False, load_artifacts=False
        )
    log.info("resume: from %s, weights, optimizer state and data position", checkpoint)


def validate_only(partial: run.Partial, folder: RunDir, spec: RunSpec) -> None:
    """Let the recipe validate `spec.validate` and train nothing."""
    import nemo_run as run
    from nemo import lightning as nl

    from training.validate_checkpoints import ValidateCheckpoints

    callback = run.Config(
        ValidateCheckpoints,
        checkpoints=list(spec.validate),
        first_validation=spec.first_validation or None,
        run_dir=str(folder.path),
    )
    partial.trainer.callbacks = [*partial.trainer.callbacks, callback]
    partial.resume.base = None
    partial.resume.restore_config = run.Config(
        nl.RestoreConfig, path=spec.validate[0], load_optim_state=False, load_artifacts=False
    )


def to_yaml(partial: run.Partial) -> str:
    """The resolved configuration, every class and function by its name."""
    import yaml
    from nemo_run.core.serialization.yaml import YamlSerializer

    def name_of(dumper: yaml.SafeDumper, kind: type) -> yaml.Node:
        return dumper.represent_data({"_target_": f"{kind.__module__}.{kind.__qualname__}", "_call_": False})

    yaml.SafeDumper.add_multi_representer(type, name_of)  # NeMo-Run writes functions this way, but no classes
    return str(YamlSerializer().serialize(partial))
