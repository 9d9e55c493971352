"""Merge checkpoints of one run into one: a weighted mean of their weights, computed in fp32.

Called as a process of its own, `python -m convert.merge OUTPUT WEIGHT CHECKPOINT WEIGHT CHECKPOINT ...`, by
launcher/merge_run.py, which then validates the result in a process that must not have imported torch before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from convert.nemo import NeMoCheckpoint, write_weights
from convert.tensor_map import rows


def merge_checkpoints(checkpoints: Sequence[Path], weights: Sequence[float], output: Path) -> None:
    """Write the `weights/` of a checkpoint that is the weighted mean of others.

    Every tensor is added up in fp32 and stored in the dtype of the newest checkpoint. The optimizer state is left out:
    a mean of moments belongs to no step, so that training cannot continue from the result.

    Args:
        checkpoints: of one run, oldest first.
        weights: one for each; they sum to 1.
        output: the new folder `weights`.

    Raises:
        UserError: one is no complete checkpoint.
    """
    models = [NeMoCheckpoint(checkpoint) for checkpoint in checkpoints]
    newest = models[-1]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for row in rows(newest.arch):
            stored = newest.tensor(row.megatron)
            total = torch.zeros_like(stored, dtype=torch.float32)
            for model, weight in zip(models, weights, strict=True):
                total.add_(model.tensor(row.megatron).float(), alpha=weight)
            yield row.megatron, total.to(stored.dtype)

    write_weights(output, newest.arch.num_layers, tensors())


def _main(output: str, *pairs: str) -> None:
    merge_checkpoints([Path(one) for one in pairs[1::2]], [float(one) for one in pairs[::2]], Path(output))


if __name__ == "__main__":
    from common.errors import ProjectError

    try:
        _main(*sys.argv[1:])
    except ProjectError as error:
        sys.exit(f"{error.explain()}")
