"""Documents of a packed sequence kept apart (`data.isolate_documents`): each attends only to itself, from position 0.

`data.module.data_step` joins the samples of a micro batch to one row and gives the documents' borders (`cu_seqlens`).
Here the row becomes a forward pass of Megatron in its THD format: Transformer Engine's attention and RoPE read the
borders; without it, SDPA gets a block mask made from them (recipes/build/layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from data.module import CU_SEQLENS


@dataclass(eq=False)
class PackedDocuments(PackedSeqParams):
    """Megatron's parameters of a packed row, with what the attention without Transformer Engine needs beside them.

    The results are kept, so that the layers of one forward pass compute them once.
    """

    _document: torch.Tensor | None = field(default=None, repr=False)
    _mask: torch.Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, cu_seqlens: torch.Tensor, seq_length: int) -> PackedDocuments:
        """Parameters of a row of samples of `seq_length` tokens each.

        Args:
            cu_seqlens: int32[documents + 1 or more], first token of each document; entries at the end repeat the
                number of tokens in the row.
        """
        borders = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
        # no document is longer than a sample; the largest one's length would make the host wait for the GPU
        return cls(qkv_format="thd", max_seqlen_q=seq_length, max_seqlen_kv=seq_length, **borders)

    def document_of(self, num_tokens: int) -> torch.Tensor:
        """The number of each token's document in the row: int64[num_tokens]."""
        if self._document is None:
            tokens = torch.arange(num_tokens, dtype=torch.int32, device=self.cu_seqlens_q.device)
            self._document = torch.searchsorted(self.cu_seqlens_q, tokens, right=True) - 1
        return self._document

    def positions(self, num_tokens: int) -> torch.Tensor:
        """The position of each token in its document: int64[num_tokens]."""
        tokens = torch.arange(num_tokens, device=self.cu_seqlens_q.device)
        first: torch.Tensor = self.cu_seqlens_q[self.document_of(num_tokens)]
        return tokens - first

    def block_mask(self, num_tokens: int) -> torch.Tensor:
        """Whether a token may attend to another one: bool[samples, 1, seq, seq]; earlier ones of its own document."""
        if self._mask is None:
            document = self.document_of(num_tokens).view(-1, 1, self.max_seqlen_q)
            same = document[..., :, None] == document[..., None, :]
            self._mask = same.tril()
        return self._mask


def packing_arguments(batch: dict[str, Any], seq_length: int) -> dict[str, Any]:
    """What a model's forward takes beside tokens and labels: nothing, or the borders of an isolated batch."""
    if batch.get(CU_SEQLENS) is None:
        return {}
    return {"packed_seq_params": PackedDocuments.of(batch[CU_SEQLENS], seq_length)}


def repeat_last_border(
    batch: dict[str, torch.Tensor | None], like: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """The batch with as many borders as the batch `like`, if that has more: empty documents at the end."""
    borders, more = batch.get(CU_SEQLENS), like.get(CU_SEQLENS)
    if borders is None or more is None or len(borders) >= len(more):
        return batch
    return {**batch, CU_SEQLENS: torch.cat([borders, borders[-1:].expand(len(more) - len(borders))])}


def forward_step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """NeMo's `gpt_forward_step`, which would cut `cu_seqlens` to the documents that there are.

    That makes the host wait for the GPU and gives every micro batch another shape, which a CUDA graph cannot have.
    """
    out: torch.Tensor = model(
        input_ids=batch["tokens"],
        position_ids=batch["position_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["labels"],
        **packing_arguments(batch, model.config.seq_length),
    )
    return out


def schedule_shape(data: Any) -> dict[str, int]:
    """`seq_length` and `micro_batch_size` of what pipeline stages send each other."""
    if getattr(data, "isolate_documents", False):
        return {"seq_length": data.seq_length * data.micro_batch_size, "micro_batch_size": 1}
    return {"seq_length": data.seq_length, "micro_batch_size": data.micro_batch_size}


class IsolateDocuments(pl.Callback):
    """Tells Megatron's schedule that the samples of a micro batch are one row."""

    def __init__(self, data: Any) -> None:
        self._shape = schedule_shape(data)

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """Change the step's shape: NeMo's last hook before it calls the schedule."""
        step.seq_length, step.micro_batch_size = self._shape["seq_length"], self._shape["micro_batch_size"]


def is_isolated(config: Any) -> bool:
    """Whether a model of this configuration is given the borders of isolated documents."""
    return getattr(config, "forward_step_fn", None) is forward_step
