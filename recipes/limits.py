"""What the numbers of a plan may be, on any machine and any data: checked before NeMo is imported."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import Any

from common.errors import UserError
from common.loggers import TITLES, parse_loggers
from recipes import memory
from recipes.plan import PATHS, Plan, Shape

_POSITIVE = (
    *("devices", "num_nodes", "seq_length", "model_seq_length", "micro_batch_size", "global_batch_size", "max_steps"),
    *("val_check_interval", "log_every_n_steps", "save_every_n_steps", "keep_checkpoints"),
    "evaluate_every_n_steps",
    *("tensor_parallel", "pipeline_parallel", "virtual_pipeline", "context_parallel"),
)
_SHAPE = tuple(field.name for field in dataclasses.fields(Shape) if field.name != "tied")
_CHOICES: dict[str, tuple[Any, ...]] = {"process_group_backend": (None, "nccl", "gloo"), "accelerator": ("gpu", "cpu")}
_PATH_OF = {name: path for path, (_, name) in PATHS.items()}


def check(plan: Plan, declared: Plan) -> None:
    """Check the numbers of a plan.

    Args:
        declared: the recipe's own plan, whose numbers the advice returns to.

    Raises:
        UserError: the first number that no run can have.
    """
    for problem in problems(plan, declared):
        raise problem


def problems(plan: Plan, declared: Plan) -> Iterator[UserError]:
    """Every number that no run can have, with an override that mends it.

    Raises:
        UserError: an unknown memory profile.
    """
    if plan.memory_profile is not None:
        memory.share_of(plan.memory_profile)
    wrong = [
        *_too_small(plan, declared, _POSITIVE),
        *_too_small(plan.shape, declared.shape, _SHAPE),
        *_not_a_choice(plan, declared),
        *_unknown_loggers(plan),
    ]
    yield from wrong
    if wrong:  # the sums below would divide by zero
        return
    yield from _not_saved(plan)
    yield from _odd_shape(plan.shape, declared.shape)
    yield from _wrong_rates(plan, declared)
    try:
        plan.learning_rate()
    except UserError as problem:
        yield problem


def _too_small(owner: Any, declared: Any, names: tuple[str, ...]) -> Iterator[UserError]:
    for name in names:
        value, was = getattr(owner, name), getattr(declared, name)
        if value is not None and value < 1:
            path = _PATH_OF[name]
            yield UserError(
                f"{path} must be positive",
                expected="a whole number, 1 or more",
                found=f"{path}={value}",
                do=f"{path}={was if was is None or was > 0 else 1}",
            )


def _not_a_choice(plan: Plan, declared: Plan) -> Iterator[UserError]:
    for name, choices in _CHOICES.items():
        if (value := getattr(plan, name)) not in choices:
            path = _PATH_OF[name]
            yield UserError(
                f"{path} has no such value",
                expected="one of " + ", ".join(map(str, choices)),
                found=f"{path}={value}",
                do=f"{path}={getattr(declared, name)}",
            )


def _unknown_loggers(plan: Plan) -> Iterator[UserError]:
    for name in parse_loggers(plan.loggers):
        if name not in TITLES:
            near = difflib.get_close_matches(name, TITLES, n=1, cutoff=0.4)
            yield UserError(
                f"log.loggers: no logger {name!r}",
                expected=" or ".join(TITLES) + ", or both as " + "+".join(TITLES) + " (TensorBoard is always on)",
                found=f"log.loggers={plan.loggers}",
                do=f"log.loggers={near[0]}" if near else "log.loggers=None",
            )


def _not_saved(plan: Plan) -> Iterator[UserError]:
    """What is evaluated during the run is a checkpoint."""
    every, saves = plan.evaluate_every_n_steps, plan.save_every_n_steps
    if every is not None and every % saves:
        yield UserError(
            "no checkpoint is written at the steps to evaluate",
            expected=f"a multiple of log.ckpt.every_n_train_steps={saves}",
            found=f"evaluate.every_n_steps={every}",
            do=f"evaluate.every_n_steps={max(1, round(every / saves)) * saves}",
        )


def _odd_shape(shape: Shape, declared: Shape) -> Iterator[UserError]:
    """Megatron rounds such a shape down without a message."""
    hidden, heads, groups = shape.hidden_size, shape.num_attention_heads, shape.num_query_groups
    names = ("hidden_size", "num_attention_heads", "num_query_groups")
    back = [f"{_PATH_OF[n]}={getattr(declared, n)}" for n in names if getattr(shape, n) != getattr(declared, n)]
    if hidden % heads or hidden // heads % 2:
        yield UserError(
            "hidden size not divisible by attention heads",
            expected=f"a multiple of 2 x {heads}: every head has an even size, which its rotary embedding halves",
            found=f"model.config.hidden_size={hidden}, model.config.num_attention_heads={heads}",
            do=" ".join(back) or f"model.config.hidden_size={max(2 * heads, hidden // (2 * heads) * 2 * heads)}",
        )
    if heads % groups:
        fitting = max(number for number in range(1, min(groups, heads) + 1) if heads % number == 0)
        yield UserError(
            "attention heads not divisible by query groups",
            expected=f"a divisor of {heads} (model.config.num_attention_heads)",
            found=f"model.config.num_query_groups={groups}",
            do=" ".join(back) or f"model.config.num_query_groups={fitting}",
        )


def _wrong_rates(plan: Plan, declared: Plan) -> Iterator[UserError]:
    if not (math.isfinite(plan.max_lr) and plan.max_lr > 0):
        yield UserError(
            "the learning rate is out of range",
            expected="a number above 0",
            found=f"optim.config.lr={plan.max_lr:g}",
            do=f"optim.config.lr={declared.max_lr:g}",
        )
    if plan.replay_share is not None and not 0 <= plan.replay_share < 1:
        yield UserError(
            "the replay share is out of range",
            expected="0 to 1 (0.25 is a quarter of the tokens), below 1",
            found=f"data.replay_share={plan.replay_share:g}",
            do=f"data.replay_share={declared.replay_share if declared.replay_share is not None else 0.25}",
        )
