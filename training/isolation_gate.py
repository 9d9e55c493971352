"""The isolation gate: what stands in one document of a sequence changes no prediction in the others."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from nemo.utils.get_rank import is_global_rank_zero

from common.errors import GateError
from data.datasets import DOCUMENT_STARTS
from training.documents import is_isolated
from training.validation import forward_losses

log = logging.getLogger("launch")
_BOUND = 1e-5  # nats; the same kernels on the same rows give the same bits, a leak of attention changes far more


def check_set_up(data: Any, config: Any) -> None:
    """Check that the model is given the borders of documents that the data isolates.

    Raises:
        GateError: a recipe's function has set data.isolate_documents on what was built without it.
    """
    if getattr(data, "isolate_documents", False) and not is_isolated(config):
        raise GateError(
            "the model is not given the documents' borders",
            expected="model.config.forward_step_fn=training.documents.forward_step, with data.isolate_documents=True",
            found=f"{config.forward_step_fn.__module__}.{config.forward_step_fn.__qualname__}",
            do="say isolate_documents=True in @recipe(...), or data.isolate_documents=True on the command line",
        )


def check_isolation(trainer: pl.Trainer, samples: list[dict[str, torch.Tensor]], num_ids: int) -> None:
    """Change the first document of a sequence, and compare the losses of all tokens after it.

    Args:
        samples: training samples, of which the first with several documents is taken.
        num_ids: the replaced ids are below it.

    Raises:
        GateError: a loss in another document has changed: attention or positions cross the border.
    """
    sample = next((one for one in samples if int(one[DOCUMENT_STARTS].sum()) > 1), None)
    if sample is None:
        if is_global_rank_zero():
            log.info("gates: none of the first %d samples has two documents to keep apart", len(samples))
        return
    second = int(sample[DOCUMENT_STARTS].nonzero()[1])
    changed = dict(sample)
    changed["tokens"] = sample["tokens"].clone()
    changed["tokens"][:second] = (sample["tokens"][:second] + 1) % num_ids
    difference = _largest_difference(trainer, sample, changed, second)
    if is_global_rank_zero():
        documents = int(sample[DOCUMENT_STARTS].sum())
        log.info(
            "gates: documents are isolated: with the first of %d documents changed, no other loss differs by more than"
            " %.1g nats (bound %g)",
            *(documents, difference, _BOUND),
        )
    if not difference <= _BOUND:
        raise GateError(
            "the documents of a sequence are not isolated",
            expected=f"losses that another document does not change (bound {_BOUND:g} nats)",
            found=f"a difference of {difference:.2g} nats after the first document was changed",
            do="take out what replaces the model's attention or data.dataset_cls, or data.isolate_documents=False",
        )


def _largest_difference(
    trainer: pl.Trainer, sample: dict[str, torch.Tensor], changed: dict[str, torch.Tensor], first: int
) -> float:
    """The largest difference of two samples' losses from token `first` on, over all ranks."""
    data, model = trainer.datamodule, trainer.strategy.model
    copies = parallel_state.get_pipeline_model_parallel_world_size()  # virtual stages take rounds of as many
    batches = [torch.utils.data.default_collate([one] * data.micro_batch_size) for one in (sample, changed)]
    batches = [batch for batch in batches for _ in range(copies)]
    model.eval()
    losses = forward_losses(model, batches, data, lambda losses, *_: losses.detach().clone())
    model.train()
    largest = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    if losses:
        before, after = (one.double().view(-1, data.seq_length)[:, first:] for one in losses[::copies])
        largest[0] = (before - after).abs().max()
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return float(largest)
