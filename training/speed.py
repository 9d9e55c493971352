"""The speed levers that Megatron has no option for: one switch each, bound to the built objects before step 1."""

# no `from __future__ import annotations`: NeMo-Run reads the constructor's types to parse overrides

import contextlib
import logging
import threading
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import get_attr_wrapped_model
from nemo.utils.get_rank import is_global_rank_zero

from common.errors import GateError
from training.async_read import AsyncRead
from training.fast import embedding, fp8, layers, lm_head, mlp, qkv, wgrad
from training.fast.gathers import finish_gathers
from training.fast.graph import GraphedSchedule
from training.fast.loss import SyncFreeLossReduction
from training.fast.optimizer import DeviceStep

log = logging.getLogger("launch")


class Speed(pl.Callback):
    """Replaces parts of Megatron and NeMo by faster ones. With all switches off both run as they are.

    recipes/build/levers.py turns on what a machine and a recipe can use.

    Args:
        sync_free_loss: keep the masked mean loss on the device (training/fast/loss.py).
        sync_free_log: give Lightning plain numbers only in steps whose logs are written, and TensorBoard its metrics
            one step later. NeMo logs several numbers per step, and the host waits for the GPU at each.
        fused_lm_head: compute output layer and cross-entropy in one function (training/fast/lm_head.py). Needs tensor
            and pipeline parallel size 1.
        fused_qkv: split and rotate the output of the QKV projection in one pass (training/fast/qkv.py).
        fused_norm: add the residual and normalise in one pass (training/fast/layers.py). Needs tensor and pipeline
            parallel size 1.
        fused_mlp: compute SwiGLU in the matrix products, with QuACK (training/fast/mlp.py). Needs `fused_norm`.
        fused_embedding: add the embedding's gradient row by row (training/fast/embedding.py). Needs tensor and pipeline
            parallel size 1.
        fp8: round the operands of gate and up to FP8 while training (training/fast/fp8.py). Another training than bf16;
            off unless asked for. Needs `fused_mlp`.
        fp8_lm_head: the same for the output layer. Needs `fused_lm_head`.
        device_step: clip gradients, run AdamW and check for NaN without a host sync (training/fast/optimizer.py).
        cuda_graph: capture a micro batch once and replay it (training/fast/graph.py). Needs `trainer.strategy.
            use_te_rng_tracker` with Transformer Engine, and pipeline parallel size 1.
    """

    def __init__(
        self,
        sync_free_loss: bool = False,
        sync_free_log: bool = False,
        fused_lm_head: bool = False,
        fused_qkv: bool = False,
        fused_norm: bool = False,
        fused_mlp: bool = False,
        fused_embedding: bool = False,
        device_step: bool = False,
        cuda_graph: bool = False,
        fp8: bool = False,
        fp8_lm_head: bool = False,
    ) -> None:
        self.sync_free_loss, self.sync_free_log = sync_free_loss, sync_free_log
        self.fused_lm_head, self.device_step = fused_lm_head, device_step
        self.fused_qkv, self.cuda_graph = fused_qkv, cuda_graph
        self.fused_norm, self.fused_mlp, self.fused_embedding = fused_norm, fused_mlp, fused_embedding
        self.fp8, self.fp8_lm_head = fp8, fp8_lm_head
        self._device_step: DeviceStep | None = None
        self._schedule: GraphedSchedule | None = None
        self._delayed_log: DelayedLog | None = None
        self._skipped_steps: AsyncRead | None = None

    def before_build(self, model: Any) -> None:
        """Replace what the build of the model reads."""
        if model.config.gradient_accumulation_fusion:
            wgrad.replace_apex()
        if self.sync_free_loss:
            model._training_loss_reduction = SyncFreeLossReduction()
        if self.fused_qkv or self.fused_lm_head or self.device_step:
            hash_triton()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bind the fused functions to the built model."""
        config, sharded = pl_module.config, _problem_with_sharding()
        into_main_grad = bool(config.gradient_accumulation_fusion)
        for chunk in trainer.strategy.megatron_parallel:
            model = _find_gpt(chunk)
            if self.fp8_lm_head:
                problem = sharded or fp8.find_problem(config, model.vocab_size)
                _require_fp8("fp8_lm_head", {"fused_lm_head": self.fused_lm_head}, problem)
            if self.fused_lm_head and _usable("fused_lm_head", sharded):
                lm_head.bind(model, into_main_grad, self.fp8_lm_head)
            if self.fused_qkv and _usable("fused_qkv", qkv.find_problem(config)):
                qkv.bind(model)
            if self.fused_embedding and _usable("fused_embedding", sharded or embedding.find_problem(config)):
                embedding.bind(model)
            self._bind_layers(model, sharded or layers.find_problem(config))

    def _bind_layers(self, model: Any, norm_problem: str | None) -> None:
        """Bind the fused norms, and on top of them the fused MLP blocks.

        Args:
            norm_problem: why the norms cannot be replaced, or None.
        """
        config = model.config
        if self.fp8:
            problem = norm_problem or mlp.find_problem(config) or fp8.find_problem(config, 2 * config.ffn_hidden_size)
            _require_fp8("fp8", {"fused_norm": self.fused_norm, "fused_mlp": self.fused_mlp}, problem)
        if self.fused_norm and _usable("fused_norm", norm_problem):
            layers.bind(model, bool(config.gradient_accumulation_fusion))
            if self.fused_mlp and _usable("fused_mlp", mlp.find_problem(config)):
                mlp.bind(model, self.fp8)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ddp_configs = [get_attr_wrapped_model(chunk, "ddp_config") for chunk in trainer.strategy.megatron_parallel]
        if self.device_step:
            chained = trainer.strategy.optimizers[0].mcore_optimizer
            if _usable("device_step", DeviceStep.find_problem(chained)):
                self._device_step = DeviceStep(chained)
                for ddp_config in ddp_configs:  # Megatron's own check, which waits for the GPU
                    ddp_config.check_for_nan_in_grad = False
        if self.cuda_graph:
            problem = GraphedSchedule.find_problem(
                pl_module.config, self.fused_lm_head, self.sync_free_loss, self.fused_qkv
            )
            self._schedule = GraphedSchedule() if _usable("cuda_graph", problem) else None
        if self.sync_free_log:
            pl_module.log = _without_unwritten_numbers(trainer, pl_module.log)
            self._delayed_log = DelayedLog(trainer)

    def on_megatron_microbatches_start(self, step: Any) -> None:
        """Replace the schedule of this step: NeMo's last hook before it reads `MegatronStep.forward_backward_func`."""
        if self._schedule is not None and not step.forward_only:
            step.__dict__["forward_backward_func"] = self._schedule
        elif self.fused_norm:
            finish_gathers(step.pipeline)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._delayed_log is not None:
            self._delayed_log.flush()
        self._raise_if_skipped()
        step = trainer.global_step
        if self._device_step is not None and (step % trainer.log_every_n_steps == 0 or step == trainer.max_steps):
            self._skipped_steps = AsyncRead({"step": step, "skipped": self._device_step.skipped})
            # several ranks read it one step later, so that all of them stop in the same step
            if step == trainer.max_steps or (trainer.world_size == 1 and self._skipped_steps.ready):
                self._raise_if_skipped()

    def _raise_if_skipped(self) -> None:
        """Raise GateError if the optimizer has skipped a step because a gradient was not finite."""
        if self._skipped_steps is None:
            return
        found, self._skipped_steps = self._skipped_steps.read(), None
        if found["skipped"]:
            raise GateError(
                "a gradient is not finite",
                expected="numbers in every gradient",
                found=f"NaN or infinity in {found['skipped']:.0f} step(s) up to step {found['step']};"
                " none of them changed the weights",
                do="lower optim.config.lr, or inspect the data of these steps",
            )

    def on_train_end(self, *_: Any) -> None:
        if self._delayed_log is not None:
            self._delayed_log.flush()
        self._raise_if_skipped()

    def on_exception(self, *_: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the device itself may be what failed
            if self._delayed_log is not None and self._delayed_log.ready:
                self._delayed_log.flush()


def hash_triton() -> None:
    """Have a thread hash Triton's own files while the model is built, where Triton is installed.

    Triton does so before its first kernel and keeps the result: 0.7 s (docs/measurements/start-up.md).
    """
    try:
        from triton.runtime.cache import triton_key
    except ImportError:
        try:  # before Triton 3.5
            from triton.compiler.compiler import triton_key
        except ImportError:
            return
    threading.Thread(target=triton_key, name="hash_triton", daemon=True).start()


def _without_unwritten_numbers(trainer: pl.Trainer, original: Any) -> Any:
    """`LightningModule.log` that drops plain numbers in steps whose logs are not written.

    Lightning copies a plain number to the GPU and waits for the copy. The numbers of the other steps are logged as
    tensors on the host.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, torch.Tensor):
            original(name, value, *args, **kwargs)
        elif (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            original(name, torch.tensor(value, dtype=torch.float32), *args, **kwargs)

    return log


class DelayedLog:
    """Replaces `_LoggerConnector.log_metrics` of Lightning 2.4, which waits for the GPU to read the metrics.

    The loggers get the same metrics with the same step number one step later (`flush`), while the GPU computes the next
    step.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._original = trainer, trainer._logger_connector.log_metrics
        self._pending: tuple[AsyncRead, int] | None = None
        trainer._logger_connector.log_metrics = self

    def __call__(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.flush()
        if not metrics or step is not None or "step" in metrics:
            self._original(metrics, step)
            return
        with_epoch = {"epoch": self._trainer.current_epoch, **metrics}
        self._pending = AsyncRead(with_epoch), self._trainer.fit_loop.epoch_loop._batches_that_stepped

    @property
    def ready(self) -> bool:
        """Whether `flush` would return without waiting."""
        return self._pending is None or self._pending[0].ready

    def flush(self) -> None:
        """Give the pending metrics to the loggers."""
        if self._pending is not None:
            (metrics, step), self._pending = self._pending, None
            self._original(metrics.read(), step)


def _find_gpt(module: Any) -> Any:
    """Megatron's GPTModel inside its wrappers (DDP, Float16Module, NeMo's model), which pass attributes through."""
    while not isinstance(module, GPTModel):
        module = module.module
    return module


def _problem_with_sharding() -> str | None:
    """Why a lever that needs the whole model on each rank cannot be used, or None."""
    ranks = (
        parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_pipeline_model_parallel_world_size()
    )
    return None if ranks == 1 else "it needs tensor and pipeline parallel size 1"


def _usable(lever: str, problem: str | None) -> bool:
    """Whether there is no problem; logs the problem otherwise."""
    if problem and is_global_rank_zero():
        log.warning("speed: %s is off: %s", lever, problem)
    return problem is None


def _require_fp8(lever: str, needed: dict[str, bool], problem: str | None) -> None:
    """Raise GateError if FP8 products, which train differently, were asked for and cannot be used."""
    found = [f"speed.{name} is off" for name, on in needed.items() if not on] + ([problem] if problem else [])
    if found:
        raise GateError(
            f"speed.{lever} cannot be used",
            expected="the levers it needs, and a model and GPU that they work on",
            found="; ".join(found),
            do=f"speed.{lever}=False trains in bf16; to keep it, mend what was found",
        )
    if is_global_rank_zero():
        log.info("speed: %s rounds operands to FP8 while training; gradients and validation use bf16", lever)
