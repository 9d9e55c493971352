"""The step-0 gate: a continued run starts with the loss of the Hugging Face model that it continues."""

from __future__ import annotations

import json
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from nemo.utils.get_rank import is_global_rank_zero

from common.errors import GateError
from common.rundir import RunDir
from data.datasets import DOCUMENT_STARTS
from training.safe_load import load_hf_model
from training.validation import mean_loss

log = logging.getLogger("launch")


def check_step0(trainer: pl.Trainer, source: str, run: RunDir) -> None:
    """Compare the restored model's loss with the HF model's on the same tokens, and write step0.json.

    The tokens are one micro batch of the first domain's validation samples. Bounds: 1e-5 nats in fp32, 1e-2 in bf16.

    Args:
        source: the HF model that the run starts from, a local folder or hub id.

    Raises:
        GateError: the difference is larger: weights were lost or mixed up in the import.
    """
    data, model = trainer.datamodule, trainer.strategy.model
    samples = next(iter(data.validation_sets().values()))
    batches = [torch.utils.data.default_collate([samples[i % len(samples)] for i in range(data.micro_batch_size)])]
    model.eval()
    ours = mean_loss(model, batches, data)
    model.train()
    fp32 = weight_dtype(model) == torch.float32
    theirs = hf_loss(source, batches[0], torch.float32 if fp32 else torch.bfloat16)
    bound = 1e-5 if fp32 else 1e-2
    tokens = batches[0]["tokens"].numel()
    row = {"megatron_loss": ours, "hf_loss": theirs, "tokens": tokens, "dtype": "float32" if fp32 else "bfloat16"}
    if is_global_rank_zero():
        run.step0.write_text(json.dumps({**row, "bound": bound}, indent=1) + "\n")
        log.info("gates: step-0 loss %.6f, HF's on the same %d tokens %.6f (bound %g)", ours, tokens, theirs, bound)
    if not abs(ours - theirs) <= bound:
        raise GateError(
            "the model does not start from its base",
            expected=f"loss {theirs:.6f} (HF {source}), within {bound:g}",
            found=f"loss {ours:.6f}",
            do=f"python launch.py convert verify {source} {json.loads(run.base.read_text())['checkpoint']}",
        )


def weight_dtype(model: Any) -> torch.dtype:
    """The dtype in which the model computes."""
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def hf_loss(source: str, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> float:
    """Mean cross-entropy (nats per token) of the HF model `source` on tokens, labels: int64[mbs, seq], in `dtype`.

    If the batch says where documents start, each is read by itself, as the run does with `data.isolate_documents`.
    """
    device = torch.cuda.current_device()
    model = load_hf_model(source, dtype).to(device)
    apart = _documents_apart(batch, dtype) if DOCUMENT_STARTS in batch else {}
    with torch.no_grad():
        out = model(batch["tokens"].to(device), **{name: value.to(device) for name, value in apart.items()})
        logits = out.logits.float().flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, batch["labels"].to(device).flatten(), reduction="none")
        mask = batch["loss_mask"].to(device).flatten()
    return float((losses.double() * mask).sum() / mask.sum())


def _documents_apart(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """HF's arguments that keep documents apart: positions, and a mask that is added to the attention scores."""
    document = batch[DOCUMENT_STARTS].cumsum(1)
    same = (document[:, :, None] == document[:, None, :]).tril()
    mask = torch.zeros(same.shape, dtype=dtype).masked_fill(~same, torch.finfo(dtype).min)
    return {"position_ids": batch["position_ids"], "attention_mask": mask[:, None]}
