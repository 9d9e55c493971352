"""The speed levers that are not Megatron options: one switch each, bound to the built objects before step 1."""

# no `from __future__ import annotations`: NeMo-Run reads the constructor's types to parse overrides

import gc
import logging
from typing import Any

import lightning.pytorch as pl
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from nemo.utils.get_rank import is_global_rank_zero

from data.module import data_step

log = logging.getLogger("launch")


class Speed(pl.Callback):
    """What runs fast instead of plain. All off: Megatron and NeMo as they are. recipes/speed.py turns them on.

    Args:
        sync_free_loss: the masked mean loss stays on the device (runtime/fast/loss.py).
        fused_lm_head: output layer and cross-entropy in one function (runtime/fast/lm_head.py); needs tensor and
            pipeline parallel size 1.
        device_step: gradient clipping, AdamW and the check for NaN without a host sync (runtime/fast/optimizer.py).
        cuda_graph: a micro batch is captured once and replayed (runtime/fast/graph.py); needs `trainer.strategy.
            use_te_rng_tracker` under Transformer Engine, and pipeline parallel size 1.
        gc_interval: steps between garbage collections; 0 leaves Python's own timing, which stalls a step now and then.
    """

    def __init__(
        self,
        sync_free_loss: bool = False,
        fused_lm_head: bool = False,
        device_step: bool = False,
        cuda_graph: bool = False,
        gc_interval: int = 0,
    ) -> None:
        self.sync_free_loss, self.fused_lm_head, self.device_step = sync_free_loss, fused_lm_head, device_step
        self.cuda_graph, self.gc_interval = cuda_graph, gc_interval
        self._step: Any = None
        self._schedule: Any = None

    def before_build(self, model: Any) -> None:
        """What must be there before the model is built."""
        from runtime.fast import wgrad

        if model.config.gradient_accumulation_fusion:
            wgrad.stand_in_for_apex()
        if self.sync_free_loss:
            from runtime.fast.loss import SyncFreeLossReduction

            model._training_loss_reduction = SyncFreeLossReduction()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bind to the built model and optimizer."""
        if self.fused_lm_head and _alone("fused_lm_head"):
            from runtime.fast import lm_head

            for module in trainer.strategy.megatron_parallel:
                lm_head.bind(_gpt(module), bool(pl_module.config.gradient_accumulation_fusion))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.device_step:
            from runtime.fast.optimizer import DeviceStep

            chained = trainer.strategy.optimizers[0].mcore_optimizer
            problem = DeviceStep.unfit(chained)
            if problem:
                log.warning("speed: device_step is off: %s", problem)
            else:
                self._step = DeviceStep(chained)
        if self.cuda_graph and _alone("cuda_graph"):
            from runtime.fast.graph import GraphedSchedule

            self._schedule = GraphedSchedule(data_step)
        if self.gc_interval:
            gc.collect()
            gc.disable()

    def on_megatron_step_start(self, step: Any) -> Any:
        """NeMo's hook before each step: MegatronStep.forward_backward_func is the schedule it will call."""
        if self._schedule is not None and not step.forward_only:
            step.__dict__["forward_backward_func"] = self._schedule
        return step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.gc_interval and step % self.gc_interval == 0:
            gc.collect()
        if self._step is not None and (step % trainer.log_every_n_steps == 0 or step == trainer.max_steps):
            skipped = int(self._step.skipped)
            if skipped:
                raise FloatingPointError(
                    f"{skipped} step(s) up to step {step} had a gradient that is not finite (NaN or infinite);"
                    " none of them changed the weights. Lower optim.config.lr, or look at the data"
                )

    def on_train_end(self, *_: Any) -> None:
        if self.gc_interval:
            gc.enable()


def _gpt(module: Any) -> Any:
    """Megatron's GPTModel inside its wrappers (DDP, Float16Module, NeMo's model), which pass attributes through."""
    while not isinstance(module, GPTModel):
        module = module.module
    return module


def _alone(lever: str) -> bool:
    """Tensor and pipeline parallel size 1; says so where not."""
    if (
        parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_pipeline_model_parallel_world_size()
        == 1
    ):
        return True
    if is_global_rank_zero():
        log.warning("speed: %s is off: it needs tensor and pipeline parallel size 1", lever)
    return False
