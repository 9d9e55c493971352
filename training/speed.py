"""The speed levers that are not Megatron options: one switch each, bound to the built objects before step 1."""

# no `from __future__ import annotations`: NeMo-Run reads the constructor's types to parse overrides

import contextlib
import gc
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model
from nemo.utils.get_rank import is_global_rank_zero

from common.errors import GateError
from training.async_read import Later
from training.fast import lm_head, qkv, wgrad
from training.fast.graph import GraphedSchedule
from training.fast.loss import SyncFreeLossReduction
from training.fast.optimizer import DeviceStep

log = logging.getLogger("launch")


class Speed(pl.Callback):
    """What runs fast instead of plain. All off: Megatron and NeMo as they are. recipes/build/levers.py turns them on.

    Args:
        sync_free_loss: the masked mean loss stays on the device (training/fast/loss.py).
        sync_free_log: Lightning gets a plain number only in the steps whose logs are written, and TensorBoard a step
            later: NeMo logs several a step, and each is a wait for the GPU.
        fused_lm_head: output layer and cross-entropy in one function (training/fast/lm_head.py); needs tensor and
            pipeline parallel size 1.
        fused_qkv: the QKV projection's output is split and rotated in one pass (training/fast/qkv.py).
        device_step: gradient clipping, AdamW and the check for NaN without a host sync (training/fast/optimizer.py).
        cuda_graph: a micro batch is captured once and replayed (training/fast/graph.py); needs `trainer.strategy.
            use_te_rng_tracker` under Transformer Engine, and pipeline parallel size 1.
        gc_freeze: Python's collector leaves alone what the imports and the build have made; walking all of it takes
            0.5 s, in the middle of a step.
    """

    def __init__(
        self,
        sync_free_loss: bool = False,
        sync_free_log: bool = False,
        fused_lm_head: bool = False,
        fused_qkv: bool = False,
        device_step: bool = False,
        cuda_graph: bool = False,
        gc_freeze: bool = False,
    ) -> None:
        self.sync_free_loss, self.sync_free_log = sync_free_loss, sync_free_log
        self.fused_lm_head, self.device_step = fused_lm_head, device_step
        self.fused_qkv, self.cuda_graph, self.gc_freeze = fused_qkv, cuda_graph, gc_freeze
        self._step: Any = None
        self._schedule: Any = None
        self._loggers: LogLater | None = None
        self._skipped: Later | None = None

    def before_build(self, model: Any) -> None:
        """What must be there before the model is built."""
        if model.config.gradient_accumulation_fusion:
            wgrad.stand_in_for_apex()
        if self.sync_free_loss:
            model._training_loss_reduction = SyncFreeLossReduction()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bind to the built model and optimizer."""
        config = pl_module.config
        for model in map(_gpt, trainer.strategy.megatron_parallel):
            if self.fused_lm_head and _alone("fused_lm_head"):
                lm_head.bind(model, bool(config.gradient_accumulation_fusion))
            if self.fused_qkv and not _off("fused_qkv", qkv.unfit(config)):
                qkv.bind(model)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ddp_configs = [get_attr_wrapped_model(chunk, "ddp_config") for chunk in trainer.strategy.megatron_parallel]
        if self.device_step:
            chained = trainer.strategy.optimizers[0].mcore_optimizer
            if not _off("device_step", DeviceStep.unfit(chained)):
                self._step = DeviceStep(chained)
                for ddp_config in ddp_configs:  # Megatron's own watch, which waits for the GPU
                    ddp_config.check_for_nan_in_grad = False
        if self.cuda_graph:
            problem = GraphedSchedule.unfit(pl_module.config, ddp_configs[0], self.fused_lm_head, self.sync_free_loss)
            self._schedule = None if _off("cuda_graph", problem) else GraphedSchedule()
        if self.sync_free_log:
            pl_module.log = _log_tensors_or_at_the_interval(trainer, pl_module.log)
            self._loggers = LogLater(trainer)
        if self.gc_freeze:
            gc.collect()
            gc.freeze()

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """NeMo's last hook before the schedule runs: `MegatronStep.forward_backward_func`, looked up once a step."""
        if self._schedule is not None and not step.forward_only:
            step.__dict__["forward_backward_func"] = self._schedule

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._loggers is not None:
            self._loggers.flush()
        self._watch()
        step = trainer.global_step
        if self._step is not None and (step % trainer.log_every_n_steps == 0 or step == trainer.max_steps):
            self._skipped = Later({"step": step, "skipped": self._step.skipped})
            if step == trainer.max_steps or (trainer.world_size == 1 and self._skipped.here):  # all ranks in one step
                self._watch()

    def _watch(self) -> None:
        """End the run if a step was skipped."""
        if self._skipped is None:
            return
        found, self._skipped = self._skipped.read(), None
        if found["skipped"]:
            raise GateError(
                "a gradient is not finite",
                expected="numbers in every gradient",
                found=f"NaN or infinity in {found['skipped']:.0f} step(s) up to step {found['step']};"
                " none of them changed the weights",
                do="lower optim.config.lr, or look at the data of these steps",
            )

    def on_train_end(self, *_: Any) -> None:
        if self._loggers is not None:
            self._loggers.flush()
        if self.gc_freeze:
            gc.unfreeze()
        self._watch()

    def on_exception(self, *_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the device itself may be what failed
            if self._loggers is not None and self._loggers.here:
                self._loggers.flush()


def _log_tensors_or_at_the_interval(trainer: pl.Trainer, log_as_usual: Any) -> Any:
    """`LightningModule.log` without the numbers that nobody would write, and the others as tensors on the host.

    Lightning copies a plain number to the GPU, and waits for the copy.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, torch.Tensor):
            log_as_usual(name, value, *args, **kwargs)
        elif (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            log_as_usual(name, torch.tensor(value, dtype=torch.float32), *args, **kwargs)

    return log


class LogLater:
    """Stands in for `_LoggerConnector.log_metrics` of Lightning 2.4, which waits for the GPU to read the metrics.

    The loggers get the same metrics of the same step a step later (`flush`), when the GPU has the next one to do.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._as_usual = trainer, trainer._logger_connector.log_metrics
        self._held: tuple[Later, int] | None = None
        trainer._logger_connector.log_metrics = self

    def __call__(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.flush()
        if not metrics or step is not None or "step" in metrics:
            self._as_usual(metrics, step)
            return
        with_epoch = {"epoch": self._trainer.current_epoch, **metrics}
        self._held = Later(with_epoch), self._trainer.fit_loop.epoch_loop._batches_that_stepped

    @property
    def here(self) -> bool:
        """Does `flush` return without waiting?"""
        return self._held is None or self._held[0].here

    def flush(self) -> None:
        """Hand on what is held."""
        if self._held is not None:
            (metrics, step), self._held = self._held, None
            self._as_usual(metrics.read(), step)


def _gpt(module: Any) -> Any:
    """Megatron's GPTModel inside its wrappers (DDP, Float16Module, NeMo's model), which pass attributes through."""
    while not isinstance(module, GPTModel):
        module = module.module
    return module


def _alone(lever: str) -> bool:
    """Tensor and pipeline parallel size 1; says so where not."""
    ranks = (
        parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_pipeline_model_parallel_world_size()
    )
    return not _off(lever, None if ranks == 1 else "it needs tensor and pipeline parallel size 1")


def _off(lever: str, problem: str | None) -> bool:
    """True, and said, where there is a problem."""
    if problem and is_global_rank_zero():
        log.warning("speed: %s is off: %s", lever, problem)
    return problem is not None
