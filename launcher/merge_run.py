"""`soup RUN`: merge checkpoints of one run, and validate the merge beside the newest of them on the same samples."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import run_lock
from common.checkpoint_files import check_undamaged, record_files
from common.commands import launch_command, python_path
from common.domain_losses import FORGOTTEN, LEARNED, format_change, name_change
from common.errors import ProjectError, UserError
from common.json_files import append_json_line, read_json_object
from common.origin import Origin
from common.run_status import DONE
from common.rundir import RUNS, RunDir, check_run_name, checkpoint_step, find_run
from common.small_files import parse_yaml, read_small_file
from launcher.fork_run import check_unused, copy_records, make_origin, record_state
from recipes.merge_weights import merge_weights

if TYPE_CHECKING:
    from rich.table import Table

RESULT = "checkpoints-validated.json"  # training/validate_checkpoints.py writes it
WORDS = {LEARNED: "better", FORGOTTEN: "worse"}
_SHAPE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "vocab_size",
    "share_embeddings_and_output_weights",
)
log = logging.getLogger("launch")


@dataclass(frozen=True)
class Soup:
    """A merge and what its validation measured.

    Args:
        origin: the checkpoints and their weights.
        newest, merged: domain -> validation row, as metrics.jsonl has it.
        change: domain -> (merged minus newest in nats per token, its paired standard error).
        kept: the run that holds it, None if it was not to be kept.
    """

    origin: Origin
    newest: dict[str, dict[str, Any]]
    merged: dict[str, dict[str, Any]]
    change: dict[str, tuple[float, float | None]]
    kept: RunDir | None

    def table(self) -> Table:
        """A row per domain: the newest checkpoint, the merge, the difference and its verdict."""
        from rich.table import Table

        table = Table("domain", f"step-{self.origin.steps[-1]}", "soup", "difference", "")
        for name, row in self.merged.items():
            change, error = self.change[name]
            verdict = name_change(change, error)
            losses = (f"{loss:.4f}" for loss in (self.newest[name]["loss"], row["loss"]))
            table.add_row(name, *losses, format_change(change, error, 4), WORDS.get(verdict, verdict))
        return table


def soup(name: str, last: int | None, shape: str, keep: str | None, root: Path = RUNS) -> Soup:
    """Merge the newest checkpoints of a run and validate the merge; the run stays as it is.

    Args:
        name: the run, NAME or runs/NAME.
        last: how many checkpoints, None for all on the disk.
        shape: of the weights, see recipes/merge_weights.py.
        keep: name of a new run that holds the merge; None: it is removed again.

    Raises:
        UserError: fewer checkpoints than asked for, checkpoints of several shapes, a damaged one, a name in use, or a
            run that trains.
    """
    run = find_run(name, root)
    checkpoints = choose_checkpoints(run, last)
    weights = tuple(merge_weights([checkpoint_step(one) for one in checkpoints], shape))
    if keep is not None:
        check_run_name(keep, "--keep my-run")
        check_unused(RunDir(keep, run.path.parent), f"{run.name}-soup")
    check_same_shapes(checkpoints)
    with _locked(run), _scratch(run) as building:
        for checkpoint in checkpoints:
            check_undamaged(checkpoint)
        origin = make_origin(run, checkpoints, weights, shape)
        log.info("soup: %s", origin.describe())
        copy_records(run, checkpoints[-1], building)
        merged = _merge(checkpoints, weights, building)
        found = _validate(run, checkpoints[-1], merged, building)
        kept = _keep(building, keep, origin, found["checkpoints"][-1]) if keep is not None else None
    change = {domain: (pair[0], pair[1]) for domain, pair in found["change"].items()}
    return Soup(origin, found["checkpoints"][0], found["checkpoints"][-1], change, kept)


def choose_checkpoints(run: RunDir, last: int | None) -> list[Path]:
    """The newest `last` complete checkpoints, or all, oldest first.

    Raises:
        UserError: fewer than two, or fewer than asked for.
    """
    there = run.complete_checkpoints()
    if len(there) >= 2 and (last is None or 2 <= last <= len(there)):
        return there[-last:] if last is not None else there
    names = ", ".join(path.name for path in there) or "none"
    more = "log.ckpt.keep_last=8 keeps more of them from the start of a run"
    if len(there) < 2:
        found = f"{len(there)} in {run.checkpoints}: {names}"
        raise UserError("nothing to merge", expected="two complete checkpoints or more", found=found, do=more)
    raise UserError(
        f"--last {last} is out of range",
        expected=f"2 to {len(there)}" if len(there) > 2 else "2",
        found=f"{len(there)} checkpoints in {run.checkpoints}: {names}",
        do=f"--last {len(there)}; {more}",
    )


def check_same_shapes(checkpoints: list[Path]) -> None:
    """Check that the checkpoints are of models of one shape, by their context/model.yaml.

    Raises:
        UserError: they are not.
    """
    shapes = {}
    for checkpoint in checkpoints:
        config = parse_yaml(read_small_file(checkpoint / "context" / "model.yaml")).get("config") or {}
        shapes[checkpoint.name] = {key: config.get(key) for key in _SHAPE}
    newest = shapes[checkpoints[-1].name]
    for name, shape in shapes.items():
        if other := [f"{key} {value}, not {newest[key]}" for key, value in shape.items() if value != newest[key]]:
            raise UserError(
                f"{name} is of another model than {checkpoints[-1].name}",
                expected="checkpoints of one run, with tensors of the same shapes",
                found="; ".join(other),
                do=f"move {checkpoints[-1].parent / name} away: it was not written by this run",
            )


@contextlib.contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Nobody trains this run, and so deletes checkpoints of it, inside this block."""
    run_lock.check_free(run.path)
    run_lock.acquire(run.path, run_lock.LAUNCHER)
    try:
        yield
    finally:
        run_lock.release(run.path, run_lock.LAUNCHER)


@contextlib.contextmanager
def _scratch(run: RunDir) -> Iterator[RunDir]:
    """A run directory to build the merge in; what an ended process may have left there is removed."""
    building = RunDir(f".soup-of-{run.name}", run.path.parent)
    shutil.rmtree(building.path, ignore_errors=True)
    try:
        yield building
    finally:
        shutil.rmtree(building.path, ignore_errors=True)


def _merge(checkpoints: list[Path], weights: tuple[float, ...], building: RunDir) -> Path:
    """The merged checkpoint, complete as any other but without the state of the optimizer."""
    newest = checkpoints[-1]
    merged = building.checkpoints / newest.name
    merged.mkdir(parents=True)
    for part in ("context", "hf", "run"):
        if (newest / part).is_dir():
            shutil.copytree(newest / part, merged / part)
    pairs = [word for pair in zip(map(repr, weights), map(str, checkpoints), strict=True) for word in pair]
    # a process of its own: the environment of the validation is set before this one imports torch
    environ = {**os.environ, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "convert.merge", str(merged / "weights"), *pairs]
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ProjectError(
            "the checkpoints could not be merged",
            expected=f"{merged / 'weights'} with their weighted mean",
            found=done.stderr.strip()[-800:],
            do=launch_command("list", str(building.path.parent), "--verify"),
        )
    record_files(merged)
    return merged


def _validate(run: RunDir, newest: Path, merged: Path, building: RunDir) -> dict[str, Any]:
    """Validate both checkpoints as the run does, on this machine: the result of training/validate_checkpoints.py."""
    from launcher.launch import launch

    spec = dataclasses.replace(
        run.spec(),
        name="validation",
        runs=str(building.path),
        executor=None,
        cluster=None,
        resume=False,
        change_blend=False,
        dryrun=False,  # of a run that was written by a dry run and started by other means
        write=False,
        gates=False,
        retries=0,
        overrides=(*run.spec().overrides, "trainer.num_nodes=1", "log.loggers=None", "resume.base=None"),
        validate=(str(newest), str(merged)),
        first_validation=str(run.first_validation),
    )
    log.info("soup: validating %s and the merge", newest)
    log.setLevel(logging.WARNING)  # what a launch says is of no interest
    try:
        code = launch(spec)
    finally:
        log.setLevel(logging.NOTSET)
    found = read_json_object(building.path / "validation" / RESULT)
    if code or found is None or not found["checkpoints"][0]:
        raise ProjectError(
            "the merge could not be validated",
            expected="a validation of every domain",
            found=f"exit code {code}" if code else "no domain to validate: the run reads paths without a manifest",
            do="look at the lines above",
        )
    return found


def _keep(building: RunDir, name: str, origin: Origin, rows: dict[str, dict[str, Any]]) -> RunDir:
    """Make the run that holds the merge; its newest validation is the merge's."""
    shutil.rmtree(building.path / "validation")
    step, mean = origin.steps[-1], sum(row["loss"] for row in rows.values()) / len(rows)
    append_json_line(building.metrics, {"step": step, "time": time.time(), "val_loss": mean, "validation": rows})
    origin.write(building.origin)
    spec = dataclasses.replace(building.spec(), name=name)
    building.spec_file.write_text(spec.to_json())
    record_state(building, DONE, step)
    kept = RunDir(name, building.path.parent)
    building.path.rename(kept.path)
    return kept
