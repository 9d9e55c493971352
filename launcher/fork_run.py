"""`resume RUN --from step-N`: a new run that continues from an older checkpoint; the first run stays as it is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.commands import launch_command
from common.errors import UserError
from common.files import write_atomic
from common.rundir import RunDir, checkpoint_step

log = logging.getLogger("launch")


@contextlib.contextmanager
def forked(run: RunDir, checkpoint: str, name: str | None) -> Iterator[RunDir]:
    """Make the new run for the time of a launch; it is removed again if nothing was started in it.

    Args:
        checkpoint: step-N, or N.
        name: the new run's; default: NAME-from-step-N.

    Raises:
        UserError: there is no such complete checkpoint, or the new run's name is in use.
    """
    source = _find(run, checkpoint)
    new = RunDir(name or f"{run.name}-from-{source.name}", run.path.parent)
    if Path(new.name).name != new.name or new.path.exists():
        raise UserError(
            f"{new.name!r} cannot name the new run",
            expected="a plain folder name that is not in use",
            found=f"{new.path} exists" if new.path.exists() else repr(new.name),
            do=f"--name {run.name}-2",
        )
    _copy(run, source, new)
    log.info("fork: %s continues from %s; %s stays as it is", new.path, source, run.path)
    try:
        yield new
    finally:
        if not new.attempts:
            shutil.rmtree(new.path)


def _find(run: RunDir, checkpoint: str) -> Path:
    there = {path.name: path for path in run.complete_checkpoints()}
    wanted = checkpoint if checkpoint.startswith("step-") else f"step-{checkpoint}"
    if wanted in there:
        return there[wanted]
    raise UserError(
        f"run {run.name} has no complete checkpoint {wanted}",
        expected="one of " + ", ".join(there) if there else f"a checkpoint that was written to the end in {run.path}",
        found=repr(checkpoint),
        do=f"--from {list(there)[-1]}" if there else launch_command("list", run.name),
    )


def _copy(run: RunDir, checkpoint: Path, new: RunDir) -> None:
    """The checkpoint, the records of the run, and its metrics up to the checkpoint.

    The checkpoint's files are hard links where the file system has them: they take no space, and removing those of one
    run leaves those of the other.
    """
    shutil.copytree(checkpoint, new.checkpoints / checkpoint.name, copy_function=_link_or_copy)
    records = (run.config, run.env, run.version, run.data, run.blend, run.base, run.gates, run.step0)
    for file in (*records, run.first_validation):
        if file.is_file():
            shutil.copy2(file, new.path / file.name)
    write_atomic(new.spec_file, dataclasses.replace(run.spec(), name=new.name, attempt=0).to_json())
    if run.metrics.is_file():
        rows = [line for line in run.metrics.read_text().splitlines() if line.strip()]
        kept = [line for line in rows if json.loads(line)["step"] <= checkpoint_step(checkpoint)]
        write_atomic(new.metrics, "".join(line + "\n" for line in kept))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without hard links
        shutil.copy2(source, target)
