"""What changed between a checkpoint and the recipe that resumes it, and what may not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.errors import UserError

# A change here would load other weights, or silently train on other samples than the first attempt meant.
FIXED = {
    "model.config.": "the weights have another shape or another meaning",
    "data.seq_length": "the samples of the corpus would be cut anew",
    "data.global_batch_size": "consumed samples and the schedule count in global batches",
    "data.paths": "the data position belongs to this corpus",
    "data.blend": "the data position belongs to this blend",
    "data.replay_share": "the data position belongs to this blend",
    "data.seed": "the order of the samples would be another",
    "data.tokenizer": "ids would change their meaning",
    "data.reset_attention_mask": "the loss would be another",
    "data.eod_mask_loss": "the loss would be another",
    "optim.config.optimizer": "the optimizer state would not fit",
    "optim.config.use_distributed_optimizer": "the optimizer state would not fit",
}
# May change between attempts without a word: paths of the attempt, and what only this machine decides.
_OWN = ("log.", "resume.", "trainer.callbacks", "data.num_workers", "data.index_mapping_dir", "data.persistent_workers")
_FREE_IN_FIXED = ("model.config.data_step_fn", "model.config.transformer_layer_spec")


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Flattened `path -> (old, new)` of two resolved configurations, without what belongs to an attempt."""
    old, new = dict(_flat(before)), dict(_flat(now))
    found = {}
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path) and not path.startswith(_OWN):
            found[path] = (old.get(path), new.get(path))
    return found


def check(before: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> list[str]:
    """Lines that say what changed.

    Raises:
        UserError: something changed that cannot be resumed.
    """
    found = changes(before, now)
    for path, (old, new) in found.items():
        reason = next((why for start, why in FIXED.items() if path.startswith(start)), None)
        if reason and not path.startswith(_FREE_IN_FIXED):
            raise UserError(
                f"{path} cannot change when a run is resumed",
                expected=f"{old!r}, as in {checkpoint}",
                found=f"{new!r}: {reason}",
                do=f"leave {path} as it was, or start a new run with --name",
            )
    return [f"{path}: {old!r} -> {new!r}" for path, (old, new) in found.items()]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flat(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for index, child in enumerate(value):
            yield from _flat(child, f"{path}[{index}]")
    else:
        yield path, value
