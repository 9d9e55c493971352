"""What changed between a checkpoint and the recipe that resumes it, and what may not."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.checkpoint_files import find_damage, has_list, total_bytes
from common.commands import launch_command
from common.errors import UserError
from common.rundir import RunDir, checkpoint_step
from data.continue_ledger import OPTION
from data.manifest import FILE_NAME, load_manifest
from data.resolve_blend import resolve_run_blend
from recipes.plan import Plan

log = logging.getLogger("launch")

# A change here would load other weights, or silently train on other samples than the first attempt meant.
FIXED = {
    "model.config.": "the weights have another shape or another meaning",
    "data.seq_length": "the samples of the corpus would be cut anew",
    "data.global_batch_size": "consumed samples and the schedule count in global batches",
    "data.paths": "the data position belongs to this corpus",
    "data.blend": "the data position belongs to this blend",
    "data.replay_share": "the data position belongs to this blend",
    "data.forgetting_budget": "it decides what is read",
    "data.replay_bounds": "they decide what is read",
    "data.seed": "the order of the samples would be another",
    "data.tokenizer": "ids would change their meaning",
    "data.reset_attention_mask": "the loss would be another",
    "data.eod_mask_loss": "the loss would be another",
    "data.isolate_documents": "attention and the loss would be others",
    "optim.config.optimizer": "the optimizer state would not fit",
    "optim.config.use_distributed_optimizer": "the optimizer state would not fit",
}
# may change where --change-blend says so
BLEND = ("data.paths", "data.blend", "data.replay_share", "data.forgetting_budget", "data.replay_bounds")
# May change between attempts and is not logged: paths of the attempt, and what only this machine decides.
_OWN = (
    "log.",
    "resume.",
    "trainer.callbacks",
    "data.num_workers",
    "data.index_mapping_dir",
    "data.persistent_workers",
    "data.train_steps",
    "data.stages",
    "data.ledger",
    "data.attempt",
)
_FREE_IN_FIXED = (
    "model.config.data_step_fn",
    "model.config.transformer_layer_spec",
    "model.config.overlap_p2p_comm",
    "model.config.batch_p2p_comm",
    "model.config.recompute_",
    "model.config.deallocate_pipeline_outputs",
    # what recipes/build/levers.py sets by machine and layout: the same training, computed by other kernels
    "model.config.bias_activation_fusion",
    "model.config.bias_dropout_fusion",
    "model.config.cross_entropy_fusion_impl",
    "model.config.apply_rope_fusion",
    "model.config.gradient_accumulation_fusion",
    "model.config.use_te_rng_tracker",
)


def newest_good_checkpoint(run: RunDir) -> Path | None:
    """The newest complete checkpoint whose files are as they were saved; None if the run has no checkpoint.

    A damaged one is renamed to damaged-step-N, with the reason in a file `damage.txt`, so that the one before is used.

    Raises:
        UserError: every checkpoint is damaged.
    """
    damaged = []
    for checkpoint in reversed(run.complete_checkpoints()):
        start = time.monotonic()
        problems = find_damage(checkpoint)
        if not problems and not has_list(checkpoint):
            log.info("resume: %s has no list of checksums; its weight files have their full length", checkpoint)
            return checkpoint
        if not problems:
            size = total_bytes(checkpoint) / 2**30
            log.info(
                "resume: the files of %s are as saved (%.2f GiB, %.1f s)", checkpoint, size, time.monotonic() - start
            )
            return checkpoint
        damaged.append(run.set_aside_damaged(checkpoint, problems))
        log.warning("resume: %s is damaged and set aside as %s: %s", checkpoint, damaged[-1].name, "; ".join(problems))
    if damaged:
        raise UserError(
            f"every checkpoint of {run.path} is damaged",
            expected="files as they were when the checkpoint was saved",
            found=", ".join(str(folder) for folder in damaged) + " (damage.txt says how)",
            do="bring a checkpoint back from a copy as step-N, or start a new run with --name",
        )
    return None


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flattened `path -> (old, new)` of two resolved configurations, without what belongs to an attempt."""
    old, new = dict(_flat(before)), dict(_flat(now))
    found = {}
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path) and not path.startswith(_OWN):
            found[path] = (old.get(path), new.get(path))
    return found


def check(before: dict[str, Any], now: dict[str, Any], checkpoint: Path, *, change_blend: bool = False) -> list[str]:
    """Lines that say what changed.

    Args:
        change_blend: another blend than before is meant (--change-blend).

    Raises:
        UserError: something changed that cannot be resumed.
    """
    found = changes(before, now)
    for path, (old, new) in found.items():
        reason = next((why for start, why in FIXED.items() if path.startswith(start)), None)
        is_blend = path.startswith(BLEND)
        if reason and not path.startswith(_FREE_IN_FIXED) and not (is_blend and change_blend):
            raise UserError(
                f"{path} cannot change when a run is resumed",
                expected=f"{old!r}, as in {checkpoint}",
                found=f"{new!r}: {reason}",
                do=(f"{OPTION}, to train on it from here on; " if is_blend else "")
                + f"leave {path} as it was, or start a new run with --name",
            )
    return [f"{path}: {old!r} -> {new!r}" for path, (old, new) in found.items()]


def describe_if_complete(run: RunDir, plan: Plan) -> str | None:
    """What to say of a run whose newest good checkpoint is its last step; None if there are steps left."""
    newest = run.complete_checkpoints()[-1]
    step = checkpoint_step(newest)
    if step < plan.max_steps or find_damage(newest):
        return None
    longer = launch_command("resume", run.as_argument, f"trainer.max_steps={2 * plan.max_steps}")
    return f"{run.path} is complete already: step {step} of {plan.max_steps}; to train it for longer: {longer}"


def check_data(run: RunDir, now: dict[str, Any]) -> None:
    """The corpora are the ones that the run was started on.

    Raises:
        UserError: one was prepared again since.
    """
    if not run.data.exists():
        return
    for folder, then in json.loads(run.data.read_text()).items():
        found = now.get(folder)
        if found is not None and found["splits"] != then["splits"]:
            raise UserError(
                f"the corpus {folder} was prepared again since this run started",
                expected=f"train.bin {then['splits']['train']['bin_sha256'][:16]}",
                found=found["splits"]["train"]["bin_sha256"][:16],
                do="start a new run with --name, or bring the old corpus back",
            )


def check_order(before: dict[str, Any], plan: Plan, train_steps: int | None) -> None:
    """A longer run must not reshuffle the samples that were consumed.

    Megatron shuffles all epochs of a run together (the last one apart if little of it is used), so that the order
    stays only while the number of epochs does.

    Raises:
        UserError: trainer.max_steps lays the order out anew.
    """
    laid_out = max(before["trainer"]["max_steps"], before["data"].get("train_steps") or 0)
    wanted = max(plan.max_steps, train_steps or 0)
    if _layout(plan, laid_out) != _layout(plan, wanted):
        raise UserError(
            "a run of this length reads its samples in another order",
            expected=f"the order laid out for {laid_out} steps, whose epochs it keeps",
            found=f"{wanted} steps, which begin or end another epoch: samples would repeat and others be skipped",
            do=f"trainer.max_steps={laid_out} at most; or {OPTION}, which reads what is left of the laid-out samples"
            " and then the corpora again, one reading after the other",
        )


def _layout(plan: Plan, steps: int) -> list[tuple[int, bool]]:
    """(epochs, last epoch shuffled apart) of each corpus, as megatron-core's GPTDataset computes them."""
    samples, rows = steps * plan.global_batch_size, []
    if plan.blend is not None:
        trained = resolve_run_blend(plan.blend, plan.replay_share)[0].domains
        parts = [(d.tokens_available, math.ceil(math.ceil(samples * d.weight) * 1.005)) for d in trained]
    elif plan.data is not None and (Path(plan.data) / FILE_NAME).is_file():
        parts = [(load_manifest(Path(plan.data)).splits["train"].tokens, samples)]
    else:
        return []
    for tokens, wanted in parts:
        epochs = max(1, math.ceil((wanted * plan.seq_length + 1) / tokens))
        before_last = ((epochs - 1) * tokens - 1) // plan.seq_length
        per_epoch = (tokens - 1) // plan.seq_length
        rows.append((epochs, epochs > 1 and wanted - before_last < int(0.8 * per_epoch)))
    return rows


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, child in enumerate(value):
            yield from _flat(child, f"{path}[{index}]")
    else:
        yield path, value
