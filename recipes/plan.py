"""The numbers of a recipe, readable before NeMo is imported.

A recipe is a `Plan` (this file, pure Python) and a function that turns it into a NeMo-Run
`run.Partial`. Preflight reads the plan in milliseconds; the Partial is built from the same plan,
so the two cannot disagree (tests/recipes compares them for every recipe).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import nemo_run as run


def _at(path: str, **kwargs: Any) -> Any:
    """A plan field that the resolved recipe holds at `path` (so an override of it is understood early)."""
    return field(metadata={"path": path}, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2.5 decoder: GQA, bias on Q/K/V only, RMSNorm, SwiGLU, RoPE.

    Source: Qwen2.5 technical report (arXiv 2412.15115), table 1.
    """

    num_layers: int = _at("model.config.num_layers")
    hidden_size: int = _at("model.config.hidden_size")
    ffn_hidden_size: int = _at("model.config.ffn_hidden_size")
    num_attention_heads: int = _at("model.config.num_attention_heads")
    num_query_groups: int = _at("model.config.num_query_groups")
    vocab_size: int = _at("model.config.vocab_size")
    tied: bool = _at("model.config.share_embeddings_and_output_weights")

    @property
    def num_parameters(self) -> int:
        """Trainable parameters; a tied output layer counts once."""
        head_dim = self.hidden_size // self.num_attention_heads
        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * head_dim
        attention = self.hidden_size * qkv + qkv + self.num_attention_heads * head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.ffn_hidden_size
        embedding = self.vocab_size * self.hidden_size
        per_layer = attention + mlp + 2 * self.hidden_size
        return self.num_layers * per_layer + self.hidden_size + embedding * (1 if self.tied else 2)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every number of a run. Batches in samples, lengths in tokens, intervals in steps (global batches)."""

    shape: Shape
    accelerator: Literal["gpu", "cpu"]
    env: str
    data: str | None = _at("data.paths", default=None)
    blend: dict[str, Any] | str | None = _at("data.blend", default=None)
    replay_share: float | None = _at("data.replay_share", default=None)
    seq_length: int = _at("data.seq_length")
    micro_batch_size: int = _at("data.micro_batch_size")
    global_batch_size: int = _at("data.global_batch_size")
    max_steps: int = _at("trainer.max_steps")
    warmup_steps: int = _at("optim.lr_scheduler.warmup_steps")
    max_lr: float = _at("optim.config.lr")
    min_lr: float = _at("optim.lr_scheduler.min_lr")
    val_check_interval: int = _at("trainer.val_check_interval")
    limit_val_batches: int = _at("trainer.limit_val_batches")
    log_every_n_steps: int = _at("trainer.log_every_n_steps")
    save_every_n_steps: int = _at("log.ckpt.every_n_train_steps")
    keep_checkpoints: int = _at("log.ckpt.keep_last", default=2)
    keep_best: str | None = _at("log.ckpt.keep_best", default=None)
    devices: int = _at("trainer.devices", default=1)
    num_nodes: int = _at("trainer.num_nodes", default=1)
    tensor_parallel: int = _at("trainer.strategy.tensor_model_parallel_size", default=1)
    pipeline_parallel: int = _at("trainer.strategy.pipeline_model_parallel_size", default=1)
    virtual_pipeline: int | None = _at("trainer.strategy.virtual_pipeline_model_parallel_size", default=None)
    sequence_parallel: bool = _at("trainer.strategy.sequence_parallel", default=False)
    context_parallel: int = _at("trainer.strategy.context_parallel_size", default=1)
    distributed_optimizer: bool = _at("optim.config.use_distributed_optimizer", default=True)
    base: str | None = _at("resume.base", default=None)
    memory_profile: str | None = None  # of recipes/memory.py: the launcher fits the batch to the card
    model_seq_length: int = _at("model.config.seq_length", default=0)

    def __post_init__(self) -> None:
        if not self.model_seq_length:
            object.__setattr__(self, "model_seq_length", self.seq_length)

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        """Replicas of the model: world size / (TP x PP x CP), rounded down."""
        return self.devices * self.num_nodes // max(1, self.model_parallel)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that share one replica's optimizer state."""
        return max(1, self.data_parallel) if self.distributed_optimizer else 1

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of a replica in one step, rounded down."""
        return self.global_batch_size // max(1, self.micro_batch_size * self.data_parallel)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length

    @property
    def checkpoint_bytes(self) -> int:
        """One full checkpoint: weights and, for Adam, an fp32 master copy with two moments.

        bf16 training stores 2 + 12 bytes a parameter, fp32 training 4 + 8 (no separate master copy).
        """
        return self.shape.num_parameters * (14 if self.accelerator == "gpu" else 12)

    def values(self) -> dict[str, Any]:
        """Recipe path -> value, for every number that an override can reach."""
        fields = [(self, f) for f in dataclasses.fields(self)] + [
            (self.shape, f) for f in dataclasses.fields(self.shape)
        ]
        return {f.metadata["path"]: getattr(owner, f.name) for owner, f in fields if "path" in f.metadata}

    def replace(self, path: str, value: Any) -> Plan:
        """A copy with the number at `path` changed."""
        for owner in (self, self.shape):
            for f in dataclasses.fields(owner):
                if f.metadata.get("path") == path:
                    changed = dataclasses.replace(owner, **{f.name: value})
                    return changed if isinstance(changed, Plan) else dataclasses.replace(self, shape=changed)
        raise KeyError(path)

    def as_resolved(self, recipe: run.Partial) -> Plan:
        """The plan with the numbers that `recipe` holds now (overrides applied, function bodies edited)."""
        plan = self
        for path, value in self.values().items():
            owner: Any = recipe
            for step in path.split("."):
                owner = getattr(owner, step)
            if owner != value:
                plan = plan.replace(path, str(owner) if path == "data.paths" and owner is not None else owner)
        return plan


class Recipe:
    """A zero-argument factory of a complete `run.Partial`, with its plan in plain sight."""

    def __init__(self, plan: Plan, build: Callable[[Plan], run.Partial]) -> None:
        self.plan, self._build = plan, build
        self.__name__, self.__doc__ = build.__name__, build.__doc__

    def __call__(self) -> run.Partial:
        return self._build(self.plan)


def recipe(**plan: Any) -> Callable[[Callable[[Plan], run.Partial]], Recipe]:
    """Decorator: `@recipe(shape=..., seq_length=..., ...)` over a function that builds the Partial."""
    return lambda build: Recipe(Plan(**plan), build)
