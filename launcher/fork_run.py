"""`fork RUN STEP NAME` and `resume RUN --from step-N`: a new run that continues from a checkpoint of another one.

The first run stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.checkpoint_files import LIST
from common.commands import launch_command
from common.errors import UserError
from common.files import file_sha256, write_atomic
from common.json_files import read_json_lines, to_json_line
from common.origin import Origin, read_origin
from common.run_status import INTERRUPTED, RunStatus
from common.rundir import RUNS, RunDir, check_resumable, check_run_name, checkpoint_step, find_run
from recipes.resolve import resolve

PLATEAUS = ("stable", "constant")  # phases of a schedule that can be left by a decay at any step
DECAY = 0.15  # of the steps of the run that it ends, as in the profile `wsd`
log = logging.getLogger("launch")


def fork(name: str, checkpoint: str, new_name: str, overrides: Sequence[str] = (), root: Path = RUNS) -> str:
    """Make a run that begins with a checkpoint of another one.

    Args:
        name: the run, NAME or runs/NAME.
        checkpoint: step-N, or N.
        new_name: of the new run, beside the first one.
        overrides: for the command that continues it.

    Returns:
        the command that continues it; from a plateau of the learning rate, with a decay to the end of the run.

    Raises:
        UserError: there is no such run or complete checkpoint, the new name or an override cannot be used, or no step
            is left to train.
    """
    run = find_run(name, root)
    words = choose_words(run, checkpoint, new_name, overrides)
    new = make_fork(run, find_step(run, checkpoint), new_name)
    return launch_command("resume", new.as_argument, *words)


@contextlib.contextmanager
def started_fork(
    name: str, checkpoint: str, new_name: str, overrides: Sequence[str] = (), root: Path = RUNS
) -> Iterator[tuple[RunDir, list[str]]]:
    """The same run and the overrides of that command, to be launched at once; removed again if nothing started in it.

    Raises:
        UserError: as `fork`.
    """
    run = find_run(name, root)
    words = choose_words(run, checkpoint, new_name, overrides)
    with forked(run, checkpoint, new_name) as new:
        yield new, words


def choose_words(run: RunDir, checkpoint: str, new_name: str, overrides: Sequence[str]) -> list[str]:
    """The overrides that continue a checkpoint of `run` as the run `new_name`: a decay, and the user's own.

    Raises:
        UserError: as `fork`, before anything is written.
    """
    check_run_name(new_name, "a name such as my-run")
    step = checkpoint_step(find_step(run, checkpoint))
    words = [*decay_words(run, step), *overrides]
    spec = run.spec()
    plan = resolve(dataclasses.replace(spec, overrides=(*spec.overrides, *words))).plan
    if step >= plan.max_steps:
        raise UserError(
            f"no step is left to train after step-{step}",
            expected=f"more than {step} steps",
            found=f"max_steps={plan.max_steps}",
            do=launch_command("fork", run.as_argument, str(step), new_name, f"max_steps={2 * step}"),
        )
    return words


def decay_words(run: RunDir, step: int) -> list[str]:
    """Overrides with which the learning rate decays from `step` on; none where it is not on a plateau there."""
    schedule = resolve(run.spec()).plan.learning_rate()
    plateau = next((phase for phase in schedule.phases() if phase.name in PLATEAUS), None)
    if plateau is None or step < plateau.first or (plateau.end is not None and step > plateau.end):
        log.info("fork: schedule %s has no plateau at step %d; the new run keeps the schedule", schedule.kind, step)
        return []
    length = max(1, round(DECAY * step / (1 - DECAY)))
    return [f"fork_step={step}", f"decay_steps={length}", f"max_steps={step + length}"]


@contextlib.contextmanager
def forked(run: RunDir, checkpoint: str, name: str | None) -> Iterator[RunDir]:
    """Make the new run for the time of a launch; it is removed again if nothing was started in it.

    Args:
        checkpoint: step-N, or N.
        name: the new run's; default: NAME-from-step-N.

    Raises:
        UserError: there is no such complete checkpoint, or the new run's name is in use.
    """
    source = find_step(run, checkpoint)
    new = make_fork(run, source, name or f"{run.name}-from-{source.name}")
    try:
        yield new
    finally:
        if not new.attempts:
            shutil.rmtree(new.path)


def find_step(run: RunDir, checkpoint: str) -> Path:
    """The complete checkpoint `step-N` or `N` of a run.

    Raises:
        UserError: there is none.
    """
    there = {path.name: path for path in run.complete_checkpoints()}
    wanted = checkpoint if checkpoint.startswith("step-") else f"step-{checkpoint}"
    if wanted in there:
        return there[wanted]
    raise UserError(
        f"run {run.name} has no complete checkpoint {wanted}",
        expected="one of " + ", ".join(there) if there else f"a checkpoint that was written to the end in {run.path}",
        found=repr(checkpoint),
        do=f"{list(there)[-1]} is the newest" if there else launch_command("list", run.name),
    )


def make_fork(run: RunDir, checkpoint: Path, name: str) -> RunDir:
    """A new run beside `run`, with its checkpoint, its records, and its metrics up to the checkpoint.

    The checkpoint's files are hard links where the file system has them: they take no space, and removing those of one
    run leaves those of the other.

    Raises:
        UserError: the name is in use, or `run` holds a merge, which has no state of the optimizer.
    """
    check_resumable(run)
    new = RunDir(name, run.path.parent)
    check_unused(new, f"{run.name}-2")
    shutil.copytree(checkpoint, new.checkpoints / checkpoint.name, copy_function=_link_or_copy)
    copy_records(run, checkpoint, new)
    make_origin(run, [checkpoint]).write(new.origin)
    record_state(new, INTERRUPTED, checkpoint_step(checkpoint))
    log.info("fork: %s continues from %s; %s stays as it is", new.path, checkpoint, run.path)
    return new


def check_unused(new: RunDir, example: str) -> None:
    """Check that a run of this name can be made.

    Raises:
        UserError: it exists, or the name is a path.
    """
    if Path(new.name).name != new.name or new.path.exists():
        raise UserError(
            f"{new.name!r} cannot name the new run",
            expected="a plain folder name that is not in use",
            found=f"{new.path} exists" if new.path.exists() else repr(new.name),
            do=f"another name, such as {example}",
        )


def make_origin(run: RunDir, checkpoints: list[Path], weights: tuple[float, ...] = (), shape: str = "") -> Origin:
    """The origin of a new run: a fork of one checkpoint, or a merge of several with these weights."""
    lists = [checkpoint / LIST for checkpoint in checkpoints]
    return Origin(
        kind="merge" if weights else "fork",
        run=str(run.path),
        steps=tuple(map(checkpoint_step, checkpoints)),
        weights=weights,
        shape=shape,
        files=tuple(file_sha256(path) if path.is_file() else "" for path in lists),
        earlier=read_origin(run.origin),
    )


def copy_records(run: RunDir, checkpoint: Path, new: RunDir) -> None:
    """Copy the records of a run up to one of its checkpoints, and what that checkpoint's weights have read."""
    new.path.mkdir(parents=True, exist_ok=True)
    records = (run.config, run.env, run.version, run.data, run.blend, run.base, run.gates, run.step0)
    for file in (*records, run.first_validation, checkpoint / "run" / run.ledger.name):
        if file.is_file():
            shutil.copy2(file, new.path / file.name)
    write_atomic(new.spec_file, dataclasses.replace(run.spec(), name=new.name, attempt=0).to_json())
    if run.metrics.is_file():
        kept = [row for row in read_json_lines(run.metrics) if row.get("step", 0) <= checkpoint_step(checkpoint)]
        write_atomic(new.metrics, "".join(to_json_line(row) for row in kept))


def record_state(run: RunDir, phase: str, step: int) -> None:
    """Write how a run was made, and the state in which `list` and `monitor` show it."""
    write_atomic(run.command, shlex.join([sys.executable, *sys.argv]) + "\n")
    RunStatus(phase=phase, attempt=0, step=step, max_steps=resolve(run.spec()).plan.max_steps).write(run.status)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
