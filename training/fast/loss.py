"""The masked mean loss, computed without a wait for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction


class SyncFreeLossReduction(MaskedTokenLossReduction):
    """NeMo's masked token loss; the stock class waits for the GPU in each micro batch.

    Its `if num_valid_tokens < 0.5` copies a number to the host; here a clamp on the device has the same effect. The
    reported loss is averaged over the data-parallel ranks once per step instead of once per micro batch. Loss and
    gradients are the same (tests/training/fast/test_fast.py). Upstream: nemo/lightning/megatron_parallel.py,
    nemo_toolkit 2.3.
    """

    def forward(
        self, batch: dict[str, torch.Tensor], forward_out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Reduce the losses of one micro batch.

        Args:
            batch: loss_mask float32[mbs, seq].
            forward_out: fp32[mbs, seq], the loss of each token.

        Returns:
            the sum of the masked losses, the number of unmasked tokens, and their mean for the log.
        """
        if parallel_state.get_context_parallel_world_size() > 1:
            return super().forward(batch, forward_out)  # type: ignore[no-any-return]
        mask = batch["loss_mask"].view(-1).float()
        total = (forward_out.float().view(-1) * mask).sum()
        count = mask.sum().clamp(min=1.0).to(torch.int)
        return total, count, {"mean": total.detach() / count}

    def reduce(self, losses_reduced_per_micro_batch: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Mean over micro batches and data-parallel ranks: fp32 scalar on the device."""
        rows: Any = losses_reduced_per_micro_batch
        if not rows or "mean" not in rows[0]:
            return super().reduce(rows)  # type: ignore[no-any-return]
        mean = torch.stack([row["mean"] for row in rows]).mean()
        if parallel_state.get_data_parallel_world_size() > 1:
            torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            mean /= parallel_state.get_data_parallel_world_size()
        return mean
