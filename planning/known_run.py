"""What a run and the earlier runs of its kind have measured, as the curves that a forecast is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from common.commands import launch_command
from common.domain_losses import read_domain_losses
from common.errors import ProjectError, UserError
from common.json_files import read_json_object
from common.metric_rows import Row, read_metric_rows
from common.rundir import RunDir
from launcher.earlier_runs import find_earlier_runs
from planning.loss_law import Curve
from recipes.plan import Plan
from recipes.resolve import resolve

if TYPE_CHECKING:
    from planning.loss_law import Floats

# two runs are of one kind if these numbers are equal, and what they read: length, learning rate, schedule and seed may
# differ
_KIND = (
    *("shape", "base", "data", "blend", "replay_share", "forgetting_budget", "seq_length", "tokens_per_step"),
    "isolate_documents",
)
_OTHER_RATE = 0.01  # share by which a logged learning rate may differ from the schedule's


@dataclass(frozen=True)
class KnownRun:
    """The validations of a run by domain, and the learning rate of all its steps.

    Args:
        step: the newest that is recorded.
        starts: domain -> loss at step 0, for those that were validated then.
        curves: domain -> its validations after step 0.
    """

    run: RunDir
    plan: Plan
    step: int
    starts: dict[str, float]
    curves: dict[str, Curve]


def read_known_run(run: RunDir, plan: Plan | None = None) -> KnownRun:
    """Read a run that may be unfinished.

    Args:
        plan: the run's numbers where they are resolved already.

    Raises:
        UserError: its recipe can no longer be resolved, so that the rest of its learning rate is not known.
    """
    plan = plan or _resolve(run)
    training, validation = read_metric_rows(run.metrics)
    rates = _rates(plan, training)
    found: dict[str, list[tuple[int, float]]] = {}
    for row in validation:
        for name, one in read_domain_losses(row).items():
            if numpy.isfinite(one.loss) and 0 <= row["step"] <= plan.max_steps:
                found.setdefault(name, []).append((row["step"], one.loss))
    curves, starts = {}, {}
    for name, points in found.items():
        later = [point for point in points if point[0] > 0]
        if points[0][0] == 0:
            starts[name] = points[0][1]
        steps, losses = (numpy.array([point[i] for point in later]) for i in (0, 1))
        curves[name] = Curve(rates, plan.warmup_steps, steps.astype(numpy.int64), losses.astype(numpy.float64))
    last = max((row["step"] for row in (*training, *validation)), default=0)
    return KnownRun(run, plan, last, starts, curves)


def _resolve(run: RunDir) -> Plan:
    try:
        return resolve(run.spec()).plan
    except ProjectError as problem:
        raise UserError(
            f"the learning rate of the rest of {run.path} is not known",
            expected=f"{run.spec_file} with a recipe that can be resolved",
            found=problem.what,
            do=problem.do or f"name a run that {launch_command('list')} shows",
        ) from problem


def _rates(plan: Plan, training: tuple[Row, ...]) -> Floats:
    """The schedule; up to the newest logged step what was logged, where a resume has changed the schedule since."""
    schedule = plan.learning_rate()
    rates = numpy.array([schedule.lr(step) for step in range(plan.max_steps)])
    logged = [(row["step"] - 1, row["lr"]) for row in training if isinstance(row.get("lr"), float)]
    logged = [(step, rate) for step, rate in logged if 0 <= step < plan.max_steps]
    if any(abs(rate - rates[step]) > _OTHER_RATE * plan.max_lr for step, rate in logged):
        steps, values = (numpy.array(column) for column in zip(*logged, strict=True))
        past = numpy.arange(steps[-1] + 1)
        rates[: len(past)] = numpy.interp(past, steps, values)
    return rates


def find_runs_like(known: KnownRun, root: Path) -> Iterator[KnownRun]:
    """The finished runs under `root` of the same kind, newest first, without the run itself."""
    own, read = known.plan, _read_data(known.run)
    for earlier in find_earlier_runs(root):
        plan, run = earlier.resolved.plan, RunDir.at(earlier.folder)
        same = all(getattr(plan, name) == getattr(own, name) for name in _KIND) and _read_data(run) == read
        if earlier.finished and same and earlier.folder.resolve() != known.run.path.resolve():
            yield read_known_run(run, plan)


def _read_data(run: RunDir) -> dict[str, Any]:
    """What a run has recorded of its data: the corpora by content, and their shares in each stage.

    The files that its command names may have been edited since, or prepared again.
    """
    corpora, blend = read_json_object(run.data) or {}, read_json_object(run.blend) or {}
    splits = [corpus.get("splits", {}) for corpus in corpora.values()]
    return {
        "corpora": sorted((name, split.get("bin_sha256", "")) for one in splits for name, split in one.items()),
        "roles": {domain.get("name"): domain.get("role") for domain in blend.get("domains", [])},
        "stages": [(stage.get("replay_share"), stage.get("within")) for stage in blend.get("stages", [])],
        "changed at step": blend.get("changed_at_step"),
    }


def can_teach(curve: Curve, part: float) -> bool:
    """Whether a finished run was validated where a law needs it: in its first part, after it, and at its end."""
    cut = part * curve.num_steps
    later = curve.between(cut, curve.num_steps)
    return bool(len(curve.level_points(cut).steps) and len(later.steps) > 1 and later.steps[-1] == curve.num_steps)
