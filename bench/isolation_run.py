"""One run of `bench.isolation losses`: trains a recipe, then measures its validation loss in both ways.

    python -m bench.isolation_run --recipe qwen25_tiny --steps 300 data.isolate_documents=True

Prints one JSON object: the loss in nats per token with each document by itself (`apart`) and with documents that
attend to each other (`together`), both over all tokens but the first of each document.
"""

# no `from __future__ import annotations`: NeMo-Run reads the constructor's types

import json
from typing import Any

import lightning.pytorch as pl
import torch

from bench.throughput import build_recipe, recipe_parser, train_and_time, wait_for_turn
from data.datasets import DOCUMENT_STARTS
from training.validation import load_samples, mean_loss

MEASURED: dict[str, float] = {}


class MeasureBothWays(pl.Callback):
    """Measures the validation loss after step `last` into MEASURED.

    Args:
        last: the step.
        batches: global batches of the validation split, or fewer where it is smaller.
    """

    def __init__(self, last: int, batches: int = 16) -> None:
        self.last, self.batches = last, batches

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step != self.last:
            return
        data: Any = trainer.datamodule
        (dataset,) = data.validation_sets().values()
        batches = load_samples(data, dataset, self.batches).batches
        for way in ("apart", "together"):
            read = [_as_read(batch, data.tokenizer.eod, way == "apart") for batch in batches]
            model = trainer.strategy.model
            model.eval()
            MEASURED[way] = mean_loss(model, read, data)
            model.train()


def _as_read(batch: dict[str, torch.Tensor], eod: int, apart: bool) -> dict[str, torch.Tensor]:
    """A validation batch whose documents are isolated or not, with the same tokens in the loss."""
    tokens = batch["tokens"]
    found = {"tokens": tokens, "labels": batch["labels"], "position_ids": batch["position_ids"]}
    found["loss_mask"] = (tokens != eod).float()
    if apart:
        starts = torch.ones_like(tokens, dtype=torch.bool)
        starts[:, 1:] = tokens[:, :-1] == eod
        found[DOCUMENT_STARTS] = starts
    return found


def main() -> None:
    """Train, measure and print."""
    import nemo_run as run

    args = recipe_parser(__doc__ or "").parse_intermixed_args()
    _, partial = build_recipe(args)
    partial.trainer.callbacks.insert(0, run.Config(MeasureBothWays, last=args.warmup + args.steps))
    train_and_time(partial, wait_for_turn(args.wait))
    print(json.dumps(MEASURED), flush=True)


if __name__ == "__main__":
    main()
