"""What the data module needs to know of the stages and of what was read before: `data.stages` and `data.ledger`.

Set in every rank, from the plan and from the checkpoint that all ranks continue from.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from data.continue_ledger import OPTION, find_difference, make_corpora, resume_ledger
from data.ledger import FILE_NAME, Ledger, read_ledger, stage_entries
from data.manifest import FILE_NAME as MANIFEST
from data.resolve_blend import domain_folders, load_run_blend
from recipes.plan import Plan
from recipes.stages import resolve_plan_stages

if TYPE_CHECKING:
    import nemo_run as run

log = logging.getLogger("launch")


def set_stages(
    partial: run.Partial, plan: Plan, *, attempt: int, checkpoint: Path | None = None, change_blend: bool = False
) -> None:
    """Set the stages of a run on its configuration, and the ledger that it continues.

    Args:
        checkpoint: what the run continues from.
        change_blend: the user wants another blend than before from here on.

    Raises:
        UserError: the blend is another one than the checkpoint was trained on, without `change_blend`.
    """
    import fiddle

    parameters = inspect.signature(fiddle.get_callable(partial.data)).parameters
    rows = _stage_rows(plan)
    if "stages" not in parameters or rows is None:  # another data module, or corpora without a manifest
        return
    saved = checkpoint / "run" / FILE_NAME if checkpoint is not None else None
    has_stages = plan.blend is not None and bool(load_run_blend(plan.blend).stages)
    has_stages = has_stages or plan.forgetting_budget is not None  # which moves the share as a stage does
    if saved is not None and (saved.is_file() or change_blend or has_stages):
        before = read_ledger(saved)
        order = "ledger" if has_stages or change_blend or before.order == "ledger" else "megatron"
        rows = [{**row, "order": order} for row in rows]
        ledger = _resume(before, rows, plan, attempt, change_blend)
        partial.data.ledger = str(saved)
        if order == "ledger":
            log.info("%s", describe_position(ledger))
    else:
        rows = [{**row, "order": "ledger" if has_stages else "megatron"} for row in rows]
    partial.data.stages, partial.data.attempt = rows, attempt


def in_ledger_order(partial: run.Partial) -> bool:
    """Whether the run reads its samples in the order of its ledger, which does not depend on the run's length."""
    return any(row["order"] == "ledger" for row in getattr(partial.data, "stages", None) or ())


def find_blend_change(partial: run.Partial) -> int | None:
    """The step from which the run reads another blend than it read before it; None if its blend never changed.

    Args:
        partial: after `set_stages`.
    """
    saved = getattr(partial.data, "ledger", None)
    if saved is None:
        return None
    before = read_ledger(Path(saved))
    if find_difference(before, stage_entries(partial.data.stages)) is not None:
        return before.step
    return max((stage.first for stage in before.stages if stage.change), default=None)


def _stage_rows(plan: Plan) -> list[dict[str, Any]] | None:
    """`data.stages` without the order; None where nothing says which corpora the run reads."""
    if plan.blend is not None:
        return [stage.config() for stage in resolve_plan_stages(plan).stages]
    if plan.data is not None and (Path(plan.data) / MANIFEST).is_file():
        return [{"name": "all", "first": 0, "replay_share": 0.0, "within": {Path(plan.data).name: 1.0}}]
    return None


def _resume(before: Ledger, rows: list[dict[str, Any]], plan: Plan, attempt: int, change_blend: bool) -> Ledger:
    folders, roles = {Path(plan.data or "").name: str(plan.data)}, {}
    if plan.blend is not None:
        folders = domain_folders(plan.blend)
        roles = {domain.name: str(domain.role) for domain in load_run_blend(plan.blend).domains}
    entries = stage_entries(rows)
    corpora = make_corpora(folders, roles, entries, plan.seq_length)
    has_budget = plan.forgetting_budget is not None
    ledger = resume_ledger(before, corpora, entries, attempt=attempt, change_blend=change_blend, has_budget=has_budget)
    changed = [stage for stage in ledger.stages if stage.change and stage.first == before.step]
    for stage in changed:
        log.warning("blend: changed from step %d on, by %s; stage %s", before.step, OPTION, stage.name)
    return ledger


def describe_position(ledger: Ledger) -> str:
    """What a resumed run has read of each corpus, in one line."""
    parts = []
    for corpus in ledger.corpora:
        samples = ledger.read.get(corpus.name, 0)
        number, place = corpus.locate(samples)
        parts.append(
            f"{corpus.name} {samples * ledger.seq_length:,} tokens"
            f" (reading {number + 1} at {place / corpus.size_of(number):.0%})"
        )
    return f"ledger: stage {ledger.stage_at(ledger.step).name} at step {ledger.step:,}; read: {', '.join(parts)}"


def check_change_blend(change_blend: bool, resume: bool) -> None:
    """`--change-blend` is for a run that is resumed.

    Raises:
        UserError: it is a new run.
    """
    if change_blend and not resume:
        raise UserError(
            f"{OPTION} is for a run that is resumed",
            expected=f"python launch.py resume RUN {OPTION} data.blend=FILE.yaml",
            found="a new run, which trains on any blend",
            do=f"leave {OPTION} out",
        )
