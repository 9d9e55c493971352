"""Measures 20 steps of a run through the ordinary launcher, and keeps the result for later plans of the same run.

Kept in RUNS/.calibration, one file per machine and kind of run: everything that decides the speed of a step is in the
file's name as a hash, and in the file in words.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import statistics
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from common.errors import ProjectError
from common.files import write_atomic
from common.json_files import read_json_lines, read_json_object
from common.rundir import RunDir
from common.spec import RunSpec
from common.version import code_version
from data.resolve_blend import load_run_blend
from planning.hardware import Hardware, describe_cpu, host_name
from recipes.memory import MEMORY_LEVERS
from recipes.plan import Plan
from recipes.resolve import Resolved

STEPS, SAVE_AT = 20, 10
TRIMMED = 0.2  # of the steps, left out at either end: the mean of the rest is robust against a machine that is shared
SOFTWARE = ("torch", "nemo_toolkit", "megatron-core", "transformer_engine", "quack-kernels")  # whose speed it is
WARM_UP = 3  # steps that allocate, compile and read the first samples


@dataclass(frozen=True)
class Calibration:
    """What 20 steps took.

    Args:
        step_seconds: trimmed mean of a step.
        spread: (90th percentile - 10th) / median of the steps: how quiet the machine was.
        start_seconds: from the command to the first step, and what the first steps and the first validation take longer
            than later ones.
        validation_seconds: one validation of every domain, but the first, which also reads the samples.
        stall_seconds: what a checkpoint on the way adds to the steps beside it.
        save_seconds: one checkpoint at the end, which the run waits for, and the end of the process.
        memory_gib: the most that rank 0 reported (metrics.jsonl says of what).
        power_w: median power of one GPU; None where it is not reported.
        run: the run directory, without its checkpoints.
        date: day on which it was measured.
    """

    step_seconds: float
    spread: float
    start_seconds: float
    validation_seconds: float
    stall_seconds: float
    save_seconds: float
    memory_gib: float | None
    power_w: float | None
    run: str
    date: str


def describe_kind(resolved: Resolved, hardware: Hardware) -> dict[str, Any]:
    """Everything that decides how long a step takes: two plans with the same description share their calibration."""
    plan = resolved.plan
    levers = sorted(
        str(one) for one in resolved.overrides if one.path.startswith("speed.") or one.path in MEMORY_LEVERS
    )
    names = (
        *("seq_length", "isolate_documents", "micro_batch_size", "global_batch_size", "devices", "num_nodes"),
        *("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel", "sequence_parallel"),
        "limit_val_batches",
    )
    machine = {"host": host_name(), "device": hardware.card.name if hardware.card else describe_cpu()}
    return {
        "machine": machine,
        "path": hardware.path,
        "software": {"code": code_version()} | {name: _version(name) for name in SOFTWARE},
        "shape": asdict(plan.shape),
        "numbers": {name: getattr(plan, name) for name in names},
        "levers": levers,
        "data": str(plan.blend or plan.data),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _file(resolved: Resolved, hardware: Hardware) -> Path:
    kind = json.dumps(describe_kind(resolved, hardware), sort_keys=True)
    return Path(resolved.spec.runs) / ".calibration" / f"{hashlib.sha256(kind.encode()).hexdigest()[:16]}.json"


def read_calibration(resolved: Resolved, hardware: Hardware) -> Calibration | None:
    """The kept measurement of such a run on this machine."""
    if not hardware.is_here:
        return None
    found = (read_json_object(_file(resolved, hardware)) or {}).get("measured")
    try:
        return Calibration(**found) if isinstance(found, dict) else None
    except TypeError:  # of another version
        return None


def calibrate(resolved: Resolved, hardware: Hardware) -> Calibration:
    """Train `STEPS` steps of the run in a run directory of its own, and keep what they took.

    Raises:
        ProjectError: the run cannot start, or failed.
    """
    from launcher.launch import launch, stdout_is_stderr

    folder = _free_folder(resolved)
    spec = short_spec(resolved, folder.name, _file(resolved, hardware).with_suffix(".blend.json"))
    started = time.time()
    with stdout_is_stderr():  # standard output is the plan's
        code = launch(spec)
    if code != 0:
        raise ProjectError(
            "the 20 steps of --calibrate failed",
            expected="exit code 0",
            found=f"exit code {code}; its log is above and in {folder.path}",
            do="correct what the log says, or plan without --calibrate",
        )
    found = measure(folder, started, time.time())
    _keep(resolved, hardware, found)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    return found


def _keep(resolved: Resolved, hardware: Hardware, found: Calibration) -> None:
    content = {"measured": asdict(found), "kind": describe_kind(resolved, hardware)}
    write_atomic(_file(resolved, hardware), json.dumps(content, indent=1) + "\n")


def short_spec(resolved: Resolved, name: str, blend_file: Path) -> RunSpec:
    """The same run over 20 steps, validated before and after, with a checkpoint at the end and one on the way.

    Args:
        blend_file: where the blend of the first stage is written, if the blend has stages.
    """
    words = (
        f"trainer.max_steps={STEPS}",
        "trainer.log_every_n_steps=1",
        f"trainer.val_check_interval={STEPS}",
        f"log.ckpt.every_n_train_steps={SAVE_AT}",
        "log.ckpt.keep_last=2",  # `measure` reads when the first one was complete
        "log.ckpt.keep_best=None",
        *(("data.forgetting_budget=None", "data.replay_bounds=None") if resolved.plan.forgetting_budget else ()),
        *(("evaluate.every_n_steps=None",) if resolved.plan.evaluate_every_n_steps else ()),
        *_first_stage(resolved.plan, blend_file),
    )
    spec = resolved.spec
    return dataclasses.replace(spec, name=name, tokens=None, overrides=(*spec.overrides, *words))


def _first_stage(plan: Plan, file: Path) -> tuple[str, ...]:
    """Overrides that train on the first stage, whose end the 20 steps would not reach, and validate all domains."""
    blend = load_run_blend(plan.blend) if plan.blend is not None else None
    if blend is None or not blend.stages:
        return ()
    if plan.replay_share is not None:
        blend = blend.model_copy(update={"replay_share": plan.replay_share})
    _, first = blend.parts[0]
    read = {domain.name for domain in first.domains}
    others = [one.model_copy(update={"role": "watch", "weight": None}) for one in blend.domains if one.name not in read]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, first.model_copy(update={"domains": (*first.domains, *others)}).model_dump_json() + "\n")
    return (f"data.blend={file}", "data.replay_share=None")


def _free_folder(resolved: Resolved) -> RunDir:
    root, name = Path(resolved.spec.runs), f"calibrate-{resolved.recipe.__name__}"
    taken = [path.name for path in root.glob(f"{name}*")]
    return RunDir(next(one for one in [name, *(f"{name}-{n}" for n in range(2, 10_000))] if one not in taken), root)


def _newest_file(folder: Path) -> float:
    """When a file in the folder was last written, in Unix seconds; 0 if there is none."""
    return max((path.stat().st_mtime for path in folder.rglob("*") if path.is_file()), default=0.0)


def measure(folder: RunDir, started: float, ended: float) -> Calibration:
    """What the records of the 20 steps say, and the time of the whole command (Unix seconds)."""
    from launcher.earlier_runs import read_power

    rows = read_json_lines(folder.metrics)
    steps = [row for row in rows if "step_seconds" in row]
    validations = [row["seconds"] for row in rows if "validation" in row and "seconds" in row] or [0.0]
    seconds = sorted(row["step_seconds"] for row in steps[WARM_UP:])
    cut = int(TRIMMED * len(seconds))
    kept = seconds[cut : len(seconds) - cut]
    step = sum(kept) / len(kept)
    validation = validations[-1]  # the first one also builds its data sets
    in_training = sum(row["step_seconds"] for row in steps) + sum(validations)
    longer_at_first = sum(max(0.0, row["step_seconds"] - step) for row in steps[:WARM_UP])
    longer_at_first += max(0.0, validations[0] - validation)
    beside_save = [row["step_seconds"] for row in steps if row["step"] in (SAVE_AT, SAVE_AT + 1)]
    last = max(row["time"] for row in rows)
    # where 10 steps are faster than writing a checkpoint, the second save waits for the first; a run saves less often
    first_saved = _newest_file(folder.checkpoints / f"step-{SAVE_AT}")
    waited = min(max(0.0, first_saved - last), ended - last)  # the file system's clock may be another
    return Calibration(
        step_seconds=step,
        spread=(seconds[-1 - len(seconds) // 10] - seconds[len(seconds) // 10]) / statistics.median_high(seconds),
        start_seconds=max(0.0, last - started - in_training) + longer_at_first,
        validation_seconds=validation,
        stall_seconds=max(0.0, sum(beside_save) - len(beside_save) * step),
        save_seconds=max(0.0, ended - last - waited),
        memory_gib=max((row["memory_gib"] for row in steps if "memory_gib" in row), default=None),
        power_w=read_power(folder),
        run=str(folder.path),
        date=time.strftime("%Y-%m-%d", time.gmtime(ended)),
    )
