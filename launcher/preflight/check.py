"""Preflight: checks of the plan, the data and the machine in plain Python, before NeMo is imported."""

from __future__ import annotations

import functools
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from common import machine_facts
from common.loggers import TITLES, install_command, is_installed, parse_loggers
from common.quantities import format_bytes
from common.rundir import RunDir
from common.version import ROOT
from launcher.preflight.data import check_base_model, check_blend, check_corpora
from launcher.preflight.findings import Finding, error, warning
from launcher.preflight.layout import check_layout
from launcher.preflight.ranks import check_ranks
from launcher.preflight.room import RankGpu, check_room
from recipes import limits
from recipes.plan import Plan

log = logging.getLogger("launch")
PACKAGES = ("recipes", "data", "training", "launcher", "convert", "planning", "watch", "report", "doctor", "common")


def check(
    plan: Plan, run: RunDir, *, machine: bool = True, data: bool = True, gpu: RankGpu | None = None
) -> list[Finding]:
    """Make every check and log the findings, all at once; without findings, log how many checks passed.

    Args:
        machine: this is the machine that trains; if not, its GPUs, memory and ports are left unchecked.
        data: the files of the run can be read here; if not, corpora, base model and disk are left unchecked.
        gpu: the smallest GPU that a rank gets, here or elsewhere; None where it is not known.

    Returns:
        the findings; the run cannot start if one of them is fatal.
    """
    checks = _select(plan, machine, data, gpu)
    findings = _find(checks, plan, run)
    for finding in findings:
        log.log(logging.ERROR if finding.fatal else logging.WARNING, "%s", finding.problem)
    if not findings:
        log.info("preflight: %d checks passed (%s)", len(checks), ", ".join(checks))
    if left := (_MACHINE_CHECKS.keys() | _DATA_CHECKS.keys()) - checks.keys():
        log.info("preflight: the ranks check %s when they start", ", ".join(sorted(left)))
    return findings


def find(plan: Plan, run: RunDir, *, machine: bool, data: bool, gpu: RankGpu | None) -> list[Finding]:
    """The findings of `check`, without logging them."""
    return _find(_select(plan, machine, data, gpu), plan, run)


def _select(plan: Plan, machine: bool, data: bool, gpu: RankGpu | None) -> dict[str, _Check]:
    checks = {**_CHECKS, **(_MACHINE_CHECKS if machine else {}), **(_DATA_CHECKS if data else {})}
    if gpu is not None or (machine and plan.accelerator == "cpu"):
        checks["peak memory"] = functools.partial(check_room, gpu=gpu)
    return checks


def _find(checks: dict[str, _Check], plan: Plan, run: RunDir) -> list[Finding]:
    return [
        replace(finding, in_numbers=name in _CHECKS) for name, make in checks.items() for finding in make(plan, run)
    ]


def _check_packages(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """`recipes` and `data` are common names: another package of that name on sys.path would be imported instead."""
    for name in PACKAGES:
        module = sys.modules.get(name)
        origin = Path(getattr(module, "__file__", None) or ROOT / name / "__init__.py").resolve()
        if origin.parent.parent != ROOT:
            yield error(
                f"package {name!r} is shadowed",
                expected=str(ROOT / name),
                found=str(origin.parent),
                do="run launch.py from its own folder, and take the other package out of PYTHONPATH",
            )


def _check_gpus(plan: Plan, run: RunDir) -> Iterator[Finding]:
    if plan.accelerator != "gpu":
        return
    gpus = machine_facts.query_gpus()
    count = len(gpus.visible)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = f"{count} GPU(s)" + (f" with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "")
    found += f" ({gpus.problem})" if gpus.problem else ""
    if count == 0:
        yield error(
            "this recipe needs a GPU",
            expected=f"{plan.devices} NVIDIA GPU(s) with a working driver",
            found=found,
            do="python launch.py --recipe qwen25_tiny (the same path on the CPU), or check nvidia-smi",
        )
    elif count < plan.devices:
        hidden = visible is not None and len(visible.split(",")) < plan.devices
        shown = ",".join(map(str, range(plan.devices)))
        more = f"--env dual (if you set it: CUDA_VISIBLE_DEVICES={shown})" if hidden else "make more GPUs visible"
        yield error(
            "fewer GPUs than the recipe asks for",
            expected=f"trainer.devices={plan.devices}",
            found=found,
            do=f"trainer.devices={count}, or {more}",
        )


def _check_numbers(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """What `resolve` has checked of the command's numbers, again: the recipe's function may have changed them."""
    if wrong := [Finding(problem) for problem in limits.problems(plan, plan)]:
        yield from wrong
        return
    if plan.devices * plan.num_nodes % max(1, plan.model_parallel):  # check_layout reports it
        return
    share = plan.micro_batch_size * plan.data_parallel
    product = f"micro batch {plan.micro_batch_size} x data parallel {plan.data_parallel} = {share}"
    if plan.global_batch_size % share:
        fits = max(share, plan.global_batch_size // share * share)
        yield error(
            "the global batch is not divisible",
            expected=f"a multiple of {product}",
            found=f"data.global_batch_size={plan.global_batch_size}",
            do=f"data.global_batch_size={fits}, or another data.micro_batch_size",
        )
    if plan.seq_length != plan.model_seq_length:
        yield error(
            "the data's sequence length is not the model's",
            expected=f"data.seq_length = model.config.seq_length = {plan.model_seq_length} tokens",
            found=f"data.seq_length = {plan.seq_length} tokens",
            do=f"data.seq_length={plan.seq_length} model.config.seq_length={plan.seq_length}, the same in both",
        )


def _check_schedule(plan: Plan, run: RunDir) -> Iterator[Finding]:
    for name, value, override, meaning in (
        ("warm-up", plan.warmup_steps, "optim.lr_scheduler.warmup_steps", "the peak is never reached"),
        ("validation interval", plan.val_check_interval, "trainer.val_check_interval", "none after that at step 0"),
    ):
        if value > plan.max_steps:
            yield warning(
                f"the {name} is longer than the run",
                expected=f"at most trainer.max_steps={plan.max_steps} steps",
                found=f"{value} steps: {meaning}",
                do=f"{override}={max(1, plan.max_steps // 10)}",
            )


def _check_loggers(plan: Plan, run: RunDir) -> Iterator[Finding]:
    for name in parse_loggers(plan.loggers):
        if not is_installed(name):
            yield error(
                f"{TITLES[name]} is not installed",
                expected=f"the package of log.loggers={plan.loggers} where the training runs",
                found=f"no package {name} for {sys.executable}",
                do=f"{install_command(name)}, or leave it out of log.loggers",
            )


def most_checkpoints(plan: Plan) -> int:
    """The most that are there at once: one more than is kept, as a new one is complete before an old one goes."""
    saves = math.ceil(plan.max_steps / max(1, plan.save_every_n_steps))
    return min(saves, plan.keep_checkpoints + bool(plan.keep_best) + 1)


def checkpoint_disk_bytes(plan: Plan) -> int:
    """The most that the checkpoints take."""
    return plan.checkpoint_bytes * most_checkpoints(plan)


def _check_disk(plan: Plan, run: RunDir) -> Iterator[Finding]:
    parent = next(p for p in (run.path, *run.path.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as problem:
        yield error(
            f"cannot write {run.path}",
            expected=f"a folder where files can be made: {parent}",
            found=problem.strerror or str(problem),
            do="change its rights, or run from another folder",
        )
        return
    most = most_checkpoints(plan)
    need, free = checkpoint_disk_bytes(plan), shutil.disk_usage(parent).free
    if need > free:
        yield error(
            "not enough disk for the checkpoints",
            expected=f"{format_bytes(need)} for at most {most} checkpoint(s) at once",
            found=f"{format_bytes(free)} free under {parent}",
            do="free some space, or log.ckpt.keep_last=1",
        )


_Check = Callable[[Plan, RunDir], Iterator[Finding]]
_CHECKS: dict[str, _Check] = {
    "packages": _check_packages,
    "batch and sequence": _check_numbers,
    "parallel layout": check_layout,
    "schedule": _check_schedule,
    "blend": check_blend,
}
_MACHINE_CHECKS: dict[str, _Check] = {"GPUs": _check_gpus, "memory and ports": check_ranks, "loggers": _check_loggers}
_DATA_CHECKS: dict[str, _Check] = {"corpora": check_corpora, "base model": check_base_model, "disk": _check_disk}
