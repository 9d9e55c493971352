"""What the numbers of a run say: learned and forgotten, replay against its plan, speed, and what to look at."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any

from report.read import Row, RunFiles, at, finite, number

UNCHANGED = 0.005  # nats; a smaller difference is called unchanged
ALL = "validation"  # the domain's name where a run validates on one mixture only


@dataclass(frozen=True)
class Change:
    """Validation of one domain, relative to where it started.

    Args:
        domain: its name.
        role: "new", "replay" or "" if the blend does not say.
        base: first recorded loss in nats a token; the base model's if `base_step` is 0.
        base_step: step of that loss.
        now: newest loss, NaN if it diverged.
        step: step of that.
        perplexity: base and now, None where not recorded.
        bits_per_byte: base and now, None where not recorded.
        curve: (step, loss - base), finite points only.
    """

    domain: str
    role: str
    base: float
    base_step: int
    now: float
    step: int
    perplexity: tuple[float | None, float | None]
    bits_per_byte: tuple[float | None, float | None]
    curve: list[tuple[int, float]]

    @property
    def delta(self) -> float:
        """Nats a token; below zero is learned."""
        return self.now - self.base

    @property
    def verdict(self) -> str:
        if math.isnan(self.delta):
            return "not a number"
        if self.step == self.base_step:
            return "not trained yet"
        if abs(self.delta) < UNCHANGED:
            return "unchanged"
        return "learned" if self.delta < 0 else "forgotten"


@dataclass(frozen=True)
class Replay:
    """One domain of the blend: plan and consumption, in tokens, share of all tokens, and epochs."""

    domain: str
    role: str
    planned: float | None
    planned_share: float | None
    planned_epochs: float | None
    consumed: float | None
    consumed_share: float | None
    consumed_epochs: float | None


@dataclass(frozen=True)
class Speed:
    """Over the logged intervals, without the first (start-up). Seconds a step, tokens a second, GiB, seconds."""

    tokens_per_second: float | None
    step_p50: float | None
    step_p99: float | None
    memory: float | None
    elapsed: float | None


def _domains(row: Row) -> dict[str, dict[str, Any]]:
    """domain -> {"loss", "perplexity", "bits_per_byte"} of one validation row."""
    split = row.get("validation")
    if isinstance(split, dict) and split:
        return {name: value for name, value in split.items() if isinstance(value, dict)}
    return {ALL: {"loss": row["val_loss"]}} if "val_loss" in row else {}


def changes(files: RunFiles) -> list[Change]:
    """Per domain, new domains first, then in the order of the file."""
    seen: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in files.validation:
        for domain, values in _domains(row).items():
            if number(values.get("loss")) is not None:
                seen.setdefault(domain, []).append((row["step"], values))
    if len(seen) > 1:
        seen.pop(ALL, None)
    roles = {str(d.get("name")): str(d.get("role", "")) for d in blend_domains(files)}
    found = [_change(domain, roles.get(domain, ""), points) for domain, points in seen.items()]
    return sorted(found, key=lambda c: {"new": 0, "replay": 1}.get(c.role, 2))


def _change(domain: str, role: str, points: list[tuple[int, dict[str, Any]]]) -> Change:
    (first, start), (last, end) = points[0], points[-1]
    base = float(start["loss"])
    curve = [(step, float(v["loss"]) - base) for step, v in points if math.isfinite(float(v["loss"]) - base)]
    perplexity = finite(start.get("perplexity")), finite(end.get("perplexity"))
    bits = finite(start.get("bits_per_byte")), finite(end.get("bits_per_byte"))
    return Change(domain, role, base, first, float(end["loss"]), last, perplexity, bits, curve)


def zero(files: RunFiles, changed: list[Change]) -> str:
    """What the zero line of the validation curves is."""
    if any(c.base_step for c in changed):
        return "first validation"
    return "base" if files.continued else "untrained model"


def blend_domains(files: RunFiles) -> list[dict[str, Any]]:
    """The entries of blend.json."""
    domains = files.records.get("blend.json", {}).get("domains")
    return [d for d in domains if isinstance(d, dict)] if isinstance(domains, list) else []


def replay(files: RunFiles) -> list[Replay]:
    """Plan against consumption, one row a domain of the blend."""
    domains = blend_domains(files)
    counted = [row["consumed_tokens"] for row in files.train if isinstance(row.get("consumed_tokens"), dict)]
    consumed = counted[-1] if counted else {}
    planned = {str(d.get("name")): finite(d.get("tokens_planned")) for d in domains}
    all_planned = sum(v or 0.0 for v in planned.values())
    all_consumed = sum(finite(v) or 0.0 for v in consumed.values())
    rows = []
    for d in domains:
        name, available = str(d.get("name")), finite(d.get("tokens_available"))
        plan, done = planned[name], finite(consumed.get(name))
        rows.append(
            Replay(
                name,
                str(d.get("role", "")),
                plan,
                _ratio(plan, all_planned),
                finite(d.get("epochs_planned")),
                done,
                _ratio(done, all_consumed),
                _ratio(done, available),
            )
        )
    return rows


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def replay_share(files: RunFiles) -> float | None:
    """Planned share of replayed tokens, 0 to 1."""
    return finite(files.records.get("blend.json", {}).get("replay_share"))


def series(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one column."""
    points = [(row["step"], value) for row in rows if (value := finite(row.get(key))) is not None]
    return [step for step, _ in points], [value for _, value in points]


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def speed(files: RunFiles) -> Speed:
    """Medians of what was logged."""
    rows = files.train[1:] if len(files.train) > 2 else files.train
    seconds = series(rows, "step_seconds")[1]
    memory = series(files.train, "memory_gib")[1]
    logged = series(files.train, "step_seconds")
    steps = [b - a for a, b in zip([0, *logged[0]], logged[0], strict=False)]
    return Speed(
        percentile(series(rows, "tokens_per_second")[1], 0.5),
        percentile(seconds, 0.5),
        percentile(seconds, 0.99),
        max(memory, default=None),
        sum(n * s for n, s in zip(steps, logged[1], strict=True)) or None,
    )


def smooth(values: list[float]) -> list[float]:
    """Average over about a twenty-fifth of the curve around each point, so that it does not lag behind."""
    half, sums = max(1, len(values) // 50), [0.0, *itertools.accumulate(values)]
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def spikes(files: RunFiles) -> list[int]:
    """Steps whose loss stands far above the twenty logged before it (half a nat, and eight typical deviations)."""
    steps, losses = series(files.train, "loss")
    found = []
    for i in range(5, len(losses)):
        before = losses[max(0, i - 20) : i]
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(v - middle) for v in before)
        if losses[i] - middle > max(0.5, 8 * spread):
            found.append(steps[i])
    return found


def status(files: RunFiles) -> str:
    """How far the run is, in one phrase."""
    wanted = finite(at(files.config, "trainer.max_steps"))
    if not files.train:
        return "no training step recorded"
    step = files.train[-1]["step"]
    if not wanted:
        return f"at step {step:,}"
    return f"finished, {step:,} steps" if step >= wanted else f"unfinished, step {step:,} of {wanted:,.0f}"
