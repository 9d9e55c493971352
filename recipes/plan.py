"""The numbers of a run, readable before NeMo is imported.

A recipe declares a `Plan` (pure Python, milliseconds). Preflight checks the plan, and NeMo-Run's configuration is built
from the same plan (recipes/build), so the two cannot disagree (tests/recipes compares them for every recipe).
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from common.errors import UserError
from recipes import profiles
from recipes.schedules import Schedule, build

if TYPE_CHECKING:
    import nemo_run as run


def _at(path: str, **kwargs: Any) -> Any:
    """A field whose value stands at `path` in NeMo-Run's configuration, so that an override of it changes the plan."""
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
        return sum(self.parameters_by_part.values())

    @property
    def parameters_by_part(self) -> dict[str, int]:
        """Trainable parameters of each part; a tied output layer has none of its own."""
        head_dim = self.hidden_size // self.num_attention_heads
        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * head_dim
        attention = self.hidden_size * qkv + qkv + self.num_attention_heads * head_dim * self.hidden_size
        embedding = self.vocab_size * self.hidden_size
        return {
            "embedding": embedding,
            "attention": self.num_layers * attention,
            "feed-forward": self.num_layers * 3 * self.hidden_size * self.ffn_hidden_size,
            "norms": (2 * self.num_layers + 1) * self.hidden_size,
            "output layer": 0 if self.tied else embedding,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every number of a run. Batches in samples, lengths in tokens, intervals in steps (global batches).

    Args:
        env: environment set (common/environment/sets.py); None takes the one for this number of ranks.
        profile: of recipes/profiles.py; fills the learning rate and its schedule where they are not given.
        memory_profile: of recipes/memory.py; the launcher fits the batch to that share of the GPU's memory.
        decay_end: step at which a cosine ends; not given, the `max_steps` that the recipe declares. It stays when
            `max_steps` is changed afterwards, so that extending a run does not change the steps that were done.

    Raises:
        UserError: neither a profile nor a learning rate is given.
    """

    shape: Shape
    accelerator: Literal["gpu", "cpu"] = _at("trainer.accelerator")
    env: str | None = None
    data: str | None = _at("data.paths", default=None)
    blend: dict[str, Any] | str | None = _at("data.blend", default=None)
    replay_share: float | None = _at("data.replay_share", default=None)
    forgetting_budget: dict[str, float] | None = _at("data.forgetting_budget", default=None)
    replay_bounds: list[float] | None = _at("data.replay_bounds", default=None)
    seq_length: int = _at("data.seq_length")
    isolate_documents: bool = _at("data.isolate_documents", default=False)
    micro_batch_size: int = _at("data.micro_batch_size", default=1)
    global_batch_size: int = _at("data.global_batch_size", default=1)
    max_steps: int = _at("trainer.max_steps")
    val_check_interval: int = _at("trainer.val_check_interval")
    limit_val_batches: int = _at("trainer.limit_val_batches")
    log_every_n_steps: int = _at("trainer.log_every_n_steps")
    save_every_n_steps: int = _at("log.ckpt.every_n_train_steps")
    keep_checkpoints: int = _at("log.ckpt.keep_last", default=2)
    keep_best: str | None = _at("log.ckpt.keep_best", default=None)
    evaluate_every_n_steps: int | None = _at("evaluate.every_n_steps", default=None)
    loggers: str | None = _at("log.loggers", default=None)
    fp8: bool = _at("speed.fp8", default=False)
    fp8_lm_head: bool = _at("speed.fp8_lm_head", default=False)
    devices: int = _at("trainer.devices", default=1)
    num_nodes: int = _at("trainer.num_nodes", default=1)
    tensor_parallel: int = _at("trainer.strategy.tensor_model_parallel_size", default=1)
    pipeline_parallel: int = _at("trainer.strategy.pipeline_model_parallel_size", default=1)
    virtual_pipeline: int | None = _at("trainer.strategy.virtual_pipeline_model_parallel_size", default=None)
    sequence_parallel: bool = _at("trainer.strategy.sequence_parallel", default=False)
    context_parallel: int = _at("trainer.strategy.context_parallel_size", default=1)
    process_group_backend: str | None = _at("trainer.strategy.process_group_backend", default=None)
    distributed_optimizer: bool = _at("optim.config.use_distributed_optimizer", default=True)
    base: str | None = _at("resume.base", default=None)
    model_seq_length: int = _at("model.config.seq_length", default=0)
    memory_profile: str | None = None
    profile: str | None = None
    max_lr: float = _at("optim.config.lr", default=0.0)
    schedule: str | None = _at("optim.lr_scheduler.kind", default=None)
    warmup_steps: int = _at("optim.lr_scheduler.warmup_steps", default=0)
    min_lr: float | None = _at("optim.lr_scheduler.min_lr", default=None)
    decay_end: int | None = _at("optim.lr_scheduler.decay_end", default=None)
    fork_step: int | None = _at("optim.lr_scheduler.fork_step", default=None)
    decay_steps: int | None = _at("optim.lr_scheduler.decay_steps", default=None)
    decay_shape: str | None = _at("optim.lr_scheduler.decay_shape", default=None)
    constant_lr: float | None = _at("optim.lr_scheduler.constant_lr", default=None)
    cooldown_steps: int | None = _at("optim.lr_scheduler.cooldown_steps", default=None)
    start_lr: float | None = _at("optim.lr_scheduler.start_lr", default=None)
    schedule_max_lr: float | None = _at("optim.lr_scheduler.max_lr", default=None)

    def __post_init__(self) -> None:
        def fill(name: str, value: Any) -> None:
            if not getattr(self, name):
                object.__setattr__(self, name, value)

        fill("model_seq_length", self.seq_length)
        if self.accelerator == "cpu":
            fill("process_group_backend", "gloo")
        if self.schedule is None and self.profile is not None:
            fill("max_lr", profiles.profile(self.profile).max_lr)
            for name, value in profiles.parameters(self.profile, self.max_steps).items():
                fill("schedule" if name == "kind" else name, value)
        if not self.max_lr:
            raise UserError(
                "the recipe has no learning rate",
                expected="max_lr=..., or profile=... (one of " + ", ".join(profiles.PROFILES) + ")",
                found="neither",
                do=f"optim.config.lr={10 * (self.min_lr or 1e-5):g}, or give max_lr or profile to @recipe(...)",
            )
        if self.schedule is None:
            fill("decay_end", self.max_steps)
            fill("schedule", "rewarm_cosine")

    def changed(self, **numbers: Any) -> Plan:
        """A variant that a recipe declares: as `dataclasses.replace`, with the schedule laid out again.

        Another profile or another length decides the schedule anew, save for what `numbers` gives. A schedule of its
        own replaces the profile, whose numbers do not stay behind.
        """
        if "schedule" in numbers:
            numbers = {"profile": None} | numbers
        if numbers.keys() & {"profile", "schedule", "max_steps"}:
            laid_out = dict.fromkeys(SCHEDULE, None) | {"warmup_steps": self.warmup_steps, "min_lr": self.min_lr}
            if self.profile is not None or numbers.get("profile") is not None:
                laid_out |= {"warmup_steps": 0, "min_lr": None, "max_lr": 0.0}
            numbers = laid_out | numbers
        return dataclasses.replace(self, **numbers)

    @property
    def environment_set(self) -> str:
        """The environment set of the recipe, or the one for its number of ranks."""
        if self.env is not None:
            return self.env
        if self.accelerator == "cpu":
            return "cpu"
        return "official" if self.world_size == 1 else "dual" if self.num_nodes == 1 else "multinode-ib"

    @property
    def schedule_parameters(self) -> dict[str, Any]:
        """`kind` and the parameters that are given, as StepSchedule (recipes/build/lr_slot.py) takes them."""
        given = {name: value for name, path in SCHEDULE.items() if (value := getattr(self, name)) is not None}
        return {SCHEDULE[name]: value for name, value in given.items() if name != "warmup_steps" or value}

    def learning_rate(self) -> Schedule:
        """The learning rate as a function of the step.

        Raises:
            UserError: a parameter that this kind of schedule does not have, or one that is out of range.
        """
        parameters = {"max_lr": self.max_lr, **self.schedule_parameters}
        return build(parameters.pop("kind"), **parameters)

    @property
    def world_size(self) -> int:
        """Ranks of the run: nodes x devices per node."""
        return self.devices * self.num_nodes

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one replica of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def data_parallel(self) -> int:
        """Replicas of the model: world size / (TP x PP x CP), rounded down."""
        return self.world_size // max(1, self.model_parallel)

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

        bf16 training stores 2 + 12 bytes per parameter, fp32 training 4 + 8 (no separate master copy).
        """
        return self.shape.num_parameters * (14 if self.accelerator == "gpu" else 12)

    def values(self) -> dict[str, Any]:
        """Path in NeMo-Run's configuration -> value, for every number that the plan knows."""
        return {path: getattr(getattr(self, owner) if owner else self, name) for path, (owner, name) in PATHS.items()}

    def replace(self, path: str, value: Any) -> Plan:
        """A copy with the number at `path` changed."""
        owner, name = PATHS[path]
        if not owner:
            return dataclasses.replace(self, **{name: value})
        return dataclasses.replace(self, **{owner: dataclasses.replace(getattr(self, owner), **{name: value})})

    def as_resolved(self, recipe: run.Partial) -> Plan:
        """The plan with the numbers that `recipe` holds now (overrides applied, function bodies edited)."""
        plan = self
        for path, value in self.values().items():
            try:
                now = functools.reduce(getattr, path.split("."), recipe)
            except AttributeError:  # a slot that the recipe's function has replaced by another class
                continue
            if now != value:
                plan = plan.replace(path, str(now) if path == "data.paths" and now is not None else now)
        return plan


# path in NeMo-Run's configuration -> (the plan's field that holds the owner, or "", and the field)
PATHS: dict[str, tuple[str, str]] = {
    f.metadata["path"]: (owner, f.name)
    for owner, kind in (("", Plan), ("shape", Shape))
    for f in dataclasses.fields(kind)
    if "path" in f.metadata
}
# the plan's fields of the learning-rate schedule -> their names in recipes/schedules.py
SCHEDULE: dict[str, str] = {
    name: path.rpartition(".")[2] for path, (_, name) in PATHS.items() if path.startswith("optim.lr_scheduler.")
}


@functools.cache
def type_at(path: str) -> tuple[type, bool]:
    """The type of the number at `path`, and whether it may be None."""
    owner, name = PATHS[path]
    hint = typing.get_type_hints(Shape if owner else Plan)[name]
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is Literal:
        kinds = (str,)
    return (str if str in kinds else kinds[0]), type(None) in kinds
