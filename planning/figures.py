"""Measured rates and data sheets that a plan scales from: measurements.json, which docs/measurements quotes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError, unknown_name
from recipes import registry
from recipes.plan import Plan, Shape

FILE = Path(__file__).with_name("measurements.json")
PAGES = "docs/measurements"


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: memory as the driver reports it, dense bf16 matrix rate, power limit."""

    name: str
    memory_gib: float
    bf16_tflops: float | None = None
    power_w: float | None = None


@dataclass(frozen=True)
class Measured:
    """A throughput that docs/measurements quotes.

    Args:
        plan: the run that was measured.
        path: its implementation (recipes/memory.py), or "cpu".
        tokens_per_second: of all its GPUs.
    """

    page: str
    row: str
    plan: Plan
    card: str
    path: str
    tokens_per_second: float

    @property
    def source(self) -> str:
        """Where the figure stands."""
        return f"{PAGES}/{self.page}"


@functools.cache
def load() -> dict[str, Any]:
    """The whole file."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


@functools.cache
def measured_rates() -> tuple[Measured, ...]:
    """Every quoted throughput."""
    return tuple(_measured(row) for row in load()["throughput"])


def _measured(row: dict[str, Any]) -> Measured:
    plan = dataclasses.replace(registry.resolve(row["recipe"]).plan, **row["numbers"])
    if groups := row.get("num_query_groups"):
        plan = dataclasses.replace(plan, shape=dataclasses.replace(plan.shape, num_query_groups=groups))
    return Measured(row["page"], row["row"], plan, row["card"], row["path"], row["tokens_per_second"])


def constant(name: str, *more: str) -> tuple[float, str]:
    """A single measured number, and the page that it stands on."""
    row: dict[str, Any] = functools.reduce(dict.__getitem__, more, load()[name])
    return float(row["value"]), f"{PAGES}/{row['page']}"


def flops_per_token(shape: Shape, seq_length: int) -> float:
    """Floating-point operations of training on one token: 6 per weight of a matrix product, and causal attention."""
    embedding = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    return 6.0 * (shape.num_parameters - embedding) + 6.0 * shape.num_layers * shape.hidden_size * seq_length


def find_card(name: str) -> Card:
    """The card of that name, whatever its case.

    Raises:
        UserError: it is not in the table.
    """
    names = {_letters(one): row for row in load()["cards"] for one in (row["name"], *row["also"])}
    row = names.get(_letters(name)) or names.get(_letters(name).removeprefix("nvidia"))
    if row is None:
        known = [row["name"] for row in load()["cards"]]
        raise unknown_name("GPU", name, known, "--gpu-memory-gib 24, for any other GPU", typed='--gpu "{}"')
    return _card(row)


def recognise_card(name: str, memory_gib: float) -> Card:
    """The card that the driver reports, with its own memory; without a data sheet where the table does not have it."""
    text = _letters(name)
    fitting = [row for row in load()["cards"] if any(_letters(one) in text for one in (row["name"], *row["also"]))]
    fitting = [row for row in fitting if abs(row["memory_gib"] - memory_gib) < 0.1 * memory_gib]
    if not fitting:
        return Card(name, memory_gib)
    best = max(fitting, key=lambda row: max(len(one) for one in (row["name"], *row["also"]) if _letters(one) in text))
    return dataclasses.replace(_card(best), name=name, memory_gib=memory_gib)


def _card(row: dict[str, Any]) -> Card:
    return Card(row["name"], row["memory_gib"], row["bf16_tflops"], row["power_w"])


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def nearest_rate(plan: Plan, path: str, card: Card | None) -> Measured:
    """The quoted throughput that is most like this run: layout, card, operations per token, micro batch, in that order.

    Args:
        path: its implementation (recipes/memory.py), or "cpu".

    Raises:
        UserError: nothing of that implementation was measured.
    """
    rows = [row for row in measured_rates() if row.path == path]
    if not rows:
        measured = sorted({row.path for row in measured_rates()})
        raise UserError(
            f"no throughput of the path {path} was measured",
            expected=f"a row with this path in {FILE}",
            found=f"rows of {', '.join(measured)}",
            do="--calibrate on the machine that trains, which measures 20 steps",
        )
    wanted = flops_per_token(plan.shape, plan.seq_length)

    def distance(row: Measured) -> tuple[float, ...]:
        size = flops_per_token(row.plan.shape, row.plan.seq_length)
        return (
            (row.plan.model_parallel > 1) != (plan.model_parallel > 1),
            round(abs(math.log(size / wanted)), 1),
            card is not None and _letters(row.card) not in _letters(card.name),
            row.card == "H200",  # for other cards the H100 is the closer one: memory four fifths as fast
            row.plan.world_size != plan.world_size,
            abs(math.log(row.plan.micro_batch_size / plan.micro_batch_size)),
        )

    return min(rows, key=distance)
