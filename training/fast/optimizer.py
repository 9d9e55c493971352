"""Megatron's optimizer step without a wait for the GPU: clipping, AdamW and the NaN check stay on the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch


class DeviceStep:
    """Replaces `ChainedOptimizer.step` of a bf16 or fp32 AdamW.

    The stock step copies the gradient norm to the host to decide whether to scale the gradients, and scales them in a
    pass of their own. Here the norm stays on the device and torch's fused AdamW applies the clip factor. If a gradient
    is not finite, the step changes no weight and adds one to `skipped`; training/speed.py reads that count at the
    logging interval and ends the run. The optimizer state stays where Megatron keeps it, so checkpoints do not change.

    Args:
        chained: `megatron.core.optimizer.ChainedOptimizer` of one Adam.

    Upstream: megatron/core/optimizer/optimizer.py and clip_grads.py, 0.12 and 0.13; equal to it within rounding
    (tests/training/fast/test_fast.py).
    """

    def __init__(self, chained: Any) -> None:
        self.inner = chained.chained_optimizers[0]
        self.adam = self.inner.optimizer
        self.skipped: torch.Tensor | None = None
        self._divisor: torch.Tensor | None = None
        self._skip: torch.Tensor | None = None
        self._torch_adamw = isinstance(self.adam, torch.optim.AdamW)
        self._copies = _find_copies(self.inner)
        self._tensors: dict[int, Any] = {}
        if self._copies is not None and not self._torch_adamw:
            self.adam.step = self._step_in_one_pass
            self.inner._copy_main_params_to_model_params = lambda: None  # the same kernel wrote them
        elif self._torch_adamw:
            self._make_fused()
        else:
            self.adam.step = self._step_of_te
        chained.step = self

    @staticmethod
    def find_problem(chained: Any) -> str | None:
        """Why this step cannot replace that of the optimizer, or None."""
        inner = getattr(chained, "chained_optimizers", [])
        if len(inner) != 1 or getattr(inner[0], "is_stub_optimizer", False):
            return "there is not exactly one optimizer"
        config = chained.config
        if config.optimizer != "adam" or config.fp16 or config.use_precision_aware_optimizer:
            return "the optimizer is not AdamW with fp32 state"
        return "zeros in gradients are counted" if config.log_num_zeros_in_grad else None

    @torch.no_grad()
    def __call__(self) -> tuple[bool, torch.Tensor, None]:
        """Do one step. Returns (True, the gradient norm before clipping: fp32 scalar on the device, None)."""
        self.inner.prepare_grads()
        norm = self._norm()
        finite = torch.isfinite(norm)
        clip = self.inner.config.clip_grad
        self._divisor = ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else torch.ones_like(norm)
        self._skip = (~finite).float()
        if self.skipped is None:
            self.skipped = torch.zeros_like(norm)
        self.skipped += self._skip
        if self._torch_adamw:
            self.adam.grad_scale, self.adam.found_inf = self._divisor, self._skip
        self.inner.step_with_ready_grads()
        return True, norm, None

    def _norm(self) -> torch.Tensor:
        squares = torch.stack(torch._foreach_norm(self.inner.get_main_grads_for_grad_norm())).square().sum()
        group = self.inner.get_grad_stats_parallel_group()
        if torch.distributed.get_world_size(group) > 1:
            torch.distributed.all_reduce(squares, group=group)
        return squares.sqrt()

    def _make_fused(self) -> None:
        for group in self.adam.param_groups:
            group["fused"], group["foreach"] = True, False
            for p in group["params"]:
                if "step" in self.adam.state[p]:  # a resumed run
                    self.adam.state[p]["step"] = self.adam.state[p]["step"].to(p.device)

    def _groups_of_te(self) -> Iterator[tuple[dict[str, Any], list[Any], list[dict[str, torch.Tensor]]]]:
        """Count a step in each parameter group of Transformer Engine's FusedAdam: its parameters and their states."""
        for group in self.adam.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            states = [self.adam.state[p] for p in params]
            for p, state in zip(params, states, strict=True):
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            if params:
                yield group, params, states

    def _step_in_one_pass(self) -> None:
        """Do one step of FusedAdam on its own state, with the clip factor, and write the bf16 weights as well."""
        from training.fast.kernels import AdamWTensors

        assert self._copies is not None and self._divisor is not None and self._skip is not None
        for index, (group, params, states) in enumerate(self._groups_of_te()):
            rows = [
                (p.data, state["exp_avg"], state["exp_avg_sq"], p.grad, self._copies[p])
                for p, state in zip(params, states, strict=True)
            ]
            if index not in self._tensors or self._tensors[index].moved(rows):
                self._tensors[index] = AdamWTensors(rows)
            self._tensors[index].step(
                self._divisor,
                self._skip,
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=group["step"],
            )

    def _step_of_te(self) -> None:
        """Do one step of Transformer Engine's FusedAdam, on its own state, with the clip factor applied."""
        for group, params, states in self._groups_of_te():
            count = torch.full((), float(group["step"]), device=params[0].device)
            torch._fused_adamw_(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [count] * len(params),
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=self._divisor,
                found_inf=self._skip,
            )


def _find_copies(inner: Any) -> dict[torch.Tensor, torch.Tensor] | None:
    """The slice of the bf16 weights that each fp32 weight of a DistributedOptimizer is copied to, on a GPU.

    None if some of its weights have no such copy. As in its `_copy_main_params_to_model_params` (0.12 and 0.13).
    """
    if not hasattr(inner, "shard_fp32_from_float16_groups") or importlib.util.find_spec("triton") is None:
        return None
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for mains, models in zip(inner.shard_fp32_from_float16_groups, inner.model_float16_groups, strict=True):
        for main, model in zip(mains, models, strict=True):
            place = inner._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            index, _, bucket = inner.model_param_gbuf_map[model]
            copies[main] = inner.buffers[index].buckets[bucket].param_data.view(-1)[place.start : place.end]
    mains = [p for group in inner.optimizer.param_groups for p in group["params"]]
    usable = mains and all(p in copies and p.is_cuda and copies[p].dtype == torch.bfloat16 for p in mains)
    return copies if usable else None
