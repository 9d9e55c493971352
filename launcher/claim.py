"""The run directory of a launch: chosen, locked while the launch lasts, and removed where nothing was written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from common import run_lock, rundir
from common.rundir import RunDir
from common.spec import RunSpec


@contextlib.contextmanager
def claim_run_directory(spec: RunSpec) -> Iterator[RunDir]:
    """Choose the run directory and lock it inside this block.

    A launch that was refused leaves none behind, and a dry run neither, unless it was there before or --write asks for
    it.

    Raises:
        UserError: the name cannot be taken; RunInUseError says which process has it.
    """
    folder = _lock_run_directory(spec)
    leaves_nothing = spec.dryrun and not spec.write
    is_new = not folder.path.exists()
    try:
        yield folder
    finally:
        if leaves_nothing and is_new:
            _remove_what_a_dry_run_made(folder)
        elif not leaves_nothing:
            run_lock.remove_if_unused(folder.path)  # as long as this process has the lock
            run_lock.release(folder.path, run_lock.LAUNCHER)


def _remove_what_a_dry_run_made(folder: RunDir) -> None:
    """Remove the run directory, unless a launch has taken its name meanwhile, and the folder of runs if it is empty."""
    if not folder.used:
        shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.path.parent.rmdir()


def _lock_run_directory(spec: RunSpec) -> RunDir:
    """Choose the run directory and lock it, so that a second launch takes another name or is refused."""
    while True:
        folder = rundir.choose(spec, Path(spec.runs))
        if spec.dryrun and not spec.write:
            return folder
        try:
            run_lock.check_free(folder.path)
            run_lock.acquire(folder.path, run_lock.LAUNCHER)
        except run_lock.RunInUseError:
            if spec.name or spec.resume:
                raise
            continue  # another launch was faster: the next number
        if spec.resume or not folder.used:
            return folder
        run_lock.release(folder.path, run_lock.LAUNCHER)
