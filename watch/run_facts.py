"""Numbers of a run that make the sentences of the known failures concrete: step, rate, checkpoint, batch that fits."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

from common.errors import UserError
from common.json_files import read_json_object
from common.quantities import format_bytes
from data.indexed import check_prefix
from data.manifest import SPLITS
from recipes import memory
from recipes.plan import Plan
from watch.known_failure import Match
from watch.records import Records

HIGH_RATE = 3e-3  # above this no recipe of this project trains


def fill_facts(match: Match, records: Records) -> Match:
    """The match with the facts of the run added to its groups; what the log itself says wins."""
    facts = {"run": str(records.run.path), "resume": _resume(records), "checkpoint": _checkpoint(records)}
    facts |= _rate_facts(records)
    if match.failure.name == "bus_error" and (files := _cut_files(records)):
        facts["files"] = files
    if records.plan is not None:
        facts["checkpoint_size"] = format_bytes(records.plan.checkpoint_bytes)
    return dataclasses.replace(match, groups={**facts, **match.groups})


def _cut_files(records: Records) -> str:
    """The corpus files of the run that are not as long as their index says, in one line."""
    recorded = read_json_object(records.run.data) or {}
    folders = [row["absolute_path"] for row in recorded.values() if isinstance(row, dict) and "absolute_path" in row]
    return "; ".join(p.what for folder in folders for split in SPLITS for p in check_prefix(Path(folder) / split))


def _resume(records: Records) -> str:
    if not records.run.complete_checkpoints():
        return "start again (there is no checkpoint yet)"
    try:
        return records.run.spec().resume_command
    except (UserError, ValueError, TypeError, KeyError):
        return "resume from the last checkpoint"


def _checkpoint(records: Records) -> str:
    whole = records.run.complete_checkpoints()
    if not whole:
        return "there is no checkpoint: start again"
    return f"the last complete checkpoint is {whole[-1].name} ({_resume(records)})"


def _rate_facts(records: Records) -> dict[str, str]:
    """The step that failed, its learning rate, a lower one, and the last good loss."""
    step, plan = records.status.step + 1, records.plan
    good = [r for r in records.training if isinstance(r["loss"], int | float) and math.isfinite(r["loss"])]
    facts = {"step": str(step), "lr": "unknown size", "lower_lr": "optim.config.lr=1e-4"}
    facts["last_good"] = (
        f"the last good loss was {good[-1]['loss']:.2f} in step {good[-1]['step']}"
        if good
        else "no loss had been written before it"
    )
    if plan is None:
        return facts
    rate = _rate_at(plan, step)
    facts["lr"] = f"{rate:.3g} (peak {plan.max_lr:g})"
    facts["lower_lr"] = f"optim.config.lr={plan.max_lr / 10 if plan.max_lr <= HIGH_RATE else 1e-4:g}"
    return facts


def _rate_at(plan: Plan, step: int) -> float:
    try:
        return plan.learning_rate().lr(step - 1)
    except UserError:
        return plan.max_lr


def memory_advice(records: Records, groups: dict[str, str]) -> str:
    """The batch that fits on this GPU by recipes/memory.py, or what else saves memory; "" where nothing is known."""
    plan, gpu_gib = records.plan, _gpu_gib(records, groups)
    if plan is None or gpu_gib is None:
        return ""
    fits = memory.largest_micro_batch(plan, gpu_gib)
    have = f"micro batch {plan.micro_batch_size} x {plan.seq_length} tokens is estimated at"
    have += f" {memory.estimate(plan).gpu_gib:.1f} of {gpu_gib:.1f} GiB"
    same = f"the global batch stays {plan.global_batch_size}, so the training is the same"
    if fits < plan.micro_batch_size:
        return f"data.micro_batch_size={fits} ({same}); {have}"
    if (half := memory.half_micro_batch(plan)) is not None:
        return f"nvidia-smi (is something else on the GPU?); else data.micro_batch_size={half} ({same}); {have}"
    length = plan.seq_length // 2
    return f"data.seq_length={length} model.config.seq_length={length}, or more tensor parallelism; {have}"


def _gpu_gib(records: Records, groups: dict[str, str]) -> float | None:
    """Memory of the gpu_gib: as torch said it, else from the samples."""
    said = re.match(r"([\d.]+) (GiB|MiB)", groups.get("total", ""))
    if said:
        return float(said[1]) / (1 if said[2] == "GiB" else 1024)
    for row in reversed(records.samples):
        for gpu in row.get("gpus", []):
            if "memory_total_gib" in gpu:
                return float(gpu["memory_total_gib"])
    return None
