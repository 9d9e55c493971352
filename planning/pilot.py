"""Make the short trainings of a pilot, one process each, and keep what they came to.

    pilots/NAME/pilot.json        the design, the results, the recommendation
    pilots/NAME/pilot.png         the picture
    pilots/NAME/runs/TRAINING     a run directory each, without checkpoints
    pilots/NAME/TRAINING.log      what its command printed

A pilot that is started again makes only the trainings that have not finished.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import machine_facts, run_lock, run_status
from common.commands import launch_command
from common.domain_losses import read_domain_losses
from common.errors import ProjectError, UserError
from common.files import write_atomic
from common.json_files import read_json_object
from common.metric_rows import read_metric_rows
from common.run_status import read_status
from common.rundir import RunDir, check_run_name
from common.spec import RunSpec
from common.version import ROOT
from data.resolve_blend import load_run_blend
from launcher.earlier_runs import PILOT_FILE, PILOTS
from planning.pilot_design import Design, Training, training_spec
from planning.pilot_fit import Objective, Recommendation, Result
from planning.pilot_request import PilotRequest


@dataclasses.dataclass(frozen=True)
class PilotFolder:
    """pilots/NAME."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path / PILOT_FILE

    @property
    def picture(self) -> Path:
        return self.path / "pilot.png"

    def run(self, one: Training) -> RunDir:
        return RunDir(one.name, self.path / "runs")

    def log(self, one: Training) -> Path:
        return self.path / f"{one.name}.log"


def open_folder(request: PilotRequest, design: Design) -> PilotFolder:
    """The folder of this pilot: a new one, or one with the same design.

    Raises:
        UserError: it holds a pilot of another design.
    """
    name = request.name or design.resolved.recipe.__name__
    check_run_name(name)
    folder = PilotFolder(PILOTS / name)
    described = describe_design(design)
    before = (read_json_object(folder.file) or {}).get("design")
    if before is not None and before != described:
        other = next(key for key in described if before.get(key) != described[key])
        raise UserError(
            f"{folder.path} holds another pilot",
            expected=f"{other}: {described[other]}",
            found=f"{other}: {before.get(other)}",
            do="--name ANOTHER, or delete the folder",
        )
    if before is None:
        write_atomic(folder.file, json.dumps({"design": described}, indent=1) + "\n")
    return folder


def describe_design(design: Design) -> dict[str, Any]:
    """What decides the results of a pilot, as JSON has it."""
    spec = design.resolved.spec
    described = {
        "recipe": spec.recipe,
        "base": design.plan.base,
        "profile": spec.profile,
        "overrides": list(spec.overrides),
        "tokens_per_step": design.plan.tokens_per_step,
        "run_steps": design.plan.max_steps,
        "steps": design.steps,
        "rate": design.plan.max_lr,
        "share": design.share,
        "trainings": [dataclasses.asdict(one) for one in design.trainings],
    }
    return dict(json.loads(json.dumps(described)))


def train_all(design: Design, folder: PilotFolder) -> Iterator[tuple[Training, Result, float | None]]:
    """Make the trainings that have not finished; yields each training with its result and its seconds (None: kept).

    One after the other on a CPU, or where a training takes every GPU; else as many at once as there are GPUs for.

    Raises:
        ProjectError: a training failed.
    """
    todo = []
    for one in design.trainings:
        if (found := read_result(folder.run(one), one)) is not None:
            yield one, found, None
        else:
            todo.append(one)
    slots = find_slots(design)
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for slot in slots:
        free.put(slot)

    failed = threading.Event()

    def train(one: Training) -> tuple[Training, Result, float]:
        if failed.is_set():
            raise CancelledError
        slot, started = free.get(), time.monotonic()
        try:
            return one, train_one(design, folder, one, slot), time.monotonic() - started
        except BaseException:
            failed.set()
            raise
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(slots)) as pool:
        waiting = [pool.submit(train, one) for one in todo]
        try:
            for future in waiting:
                yield future.result()
        finally:
            failed.set()  # also after Ctrl-C: what has not started does not start any more


def find_slots(design: Design) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each training that can run at the same time; [None] to leave it as it is."""
    devices = design.plan.devices
    if design.plan.accelerator == "cpu":
        return [None]
    visible = [str(gpu.index) for gpu in machine_facts.query_gpus().visible]
    groups = [visible[i : i + devices] for i in range(0, len(visible) - devices + 1, devices)]
    return [",".join(group) for group in groups] if len(groups) > 1 else [None]


def train_one(design: Design, folder: PilotFolder, one: Training, slot: str | None) -> Result:
    """Make one training in a process of its own, and read its result.

    Raises:
        ProjectError: it failed.
    """
    run = folder.run(one)
    if run.path.exists():  # an earlier attempt that did not finish
        run_lock.check_free(run.path)
        shutil.rmtree(run.path)
    command = train_command(training_spec(design, one, str(folder.path / "runs")))
    environment = {**os.environ, **({} if slot is None else {"CUDA_VISIBLE_DEVICES": slot})}
    with folder.log(one).open("w") as log:
        code = subprocess.run(command, cwd=Path.cwd(), env=environment, stdout=log, stderr=log).returncode
    found = read_result(run, one)
    if code != 0 or found is None:
        raise ProjectError(
            f"a training of the pilot failed: {one.name}",
            expected="exit code 0 and a validation at its end",
            found=f"exit code {code}; {folder.log(one)} says:\n{last_error(folder.log(one))}",
            do="solve it"
            + (f" (`{launch_command('diagnose', str(run.path))}`)" if run.attempts else "")
            + ", and start the pilot again: what has finished is kept",
        )
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return found


def last_error(log: Path) -> str:
    """The first error of a launcher's log and what follows it, at most 12 lines; without one, the log's last lines."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((number for number, line in enumerate(lines) if re.match(r"\S+ \S+ ERROR ", line)), len(lines) - 4)
    return "\n".join(lines[max(0, first) :][:12])


def train_command(spec: RunSpec) -> list[str]:
    """The command that trains a spec of a pilot."""
    options = {
        "--recipe": spec.recipe,
        "--name": spec.name,
        "--runs": spec.runs,
        "--profile": spec.profile,
        "--memory-profile": spec.memory_profile,
        "--tokens-per-step": spec.tokens_per_step,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    return [sys.executable, str(ROOT / "launch.py"), *given, *spec.overrides]


def read_result(run: RunDir, one: Training) -> Result | None:
    """What a finished training came to; None if it has not finished, or was not validated at both ends."""
    status = read_status(run.status)
    if status is None or status.phase != run_status.DONE:
        return None
    rows = {row["step"]: read_domain_losses(row) for row in read_metric_rows(run.metrics)[1]}
    start, end = rows.get(0), rows.get(status.max_steps)
    if not start or not end or start.keys() != end.keys():
        return None
    return Result(one.name, one.rate, one.share, one.steps, {name: end[name].loss - start[name].loss for name in start})


def choose_objective(design: Design, results: list[Result], most_forgotten: float | None) -> Objective:
    """The sum over all domains; with a bound on forgetting the sum over the new ones, and the bound for the others.

    Raises:
        UserError: a bound, and no old domain that could be forgotten.
    """
    names = tuple(results[0].changes)
    if most_forgotten is None:
        return Objective(names)
    roles = {} if design.plan.blend is None else {d.name: d.role for d in load_run_blend(design.plan.blend).domains}
    new = tuple(name for name in names if roles.get(name, "new") == "new")
    old = tuple(name for name in names if name not in new)
    if not old:
        raise UserError(
            "--max-forgetting needs an old domain",
            expected="a domain of the role replay or watch in the blend",
            found=", ".join(names),
            do="leave --max-forgetting out",
        )
    return Objective(new, old, most_forgotten)


def keep_pilot(
    design: Design,
    folder: PilotFolder,
    results: list[Result],
    objective: Objective,
    found: Recommendation,
    command: str,
) -> dict[str, Any]:
    """Write pilot.json; returns what it holds."""
    row = {
        "design": describe_design(design),
        "results": [dataclasses.asdict(one) for one in results],
        "objective": objective.describe(),
        "recommendation": dataclasses.asdict(found),
        "command": command,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_atomic(folder.file, json.dumps(row, indent=1) + "\n")
    return row
