"""Compute what a report shows from the rows of a run: learned and forgotten, replay, throughput, spikes."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from common.domain_losses import NOT_TRAINED, change_error, format_change, name_change, read_domain_loss
from common.run_status import FAILED
from report.read import Row, RunFiles, finite, number

SAME_BASE = 0.01  # nats per token; two runs of one base may differ so much at step 0 (the bound of the step-0 gate)
ALL = "validation"  # the domain's name where a run validates on one mixture only


@dataclass(frozen=True)
class DomainChange:
    """Validation of one domain, relative to where the run started.

    Args:
        domain: its name.
        role: "new", "replay", "watch" or "" if the blend does not say.
        base: first recorded loss in nats per token; the base model's if `base_step` is 0.
        base_step: step of that loss.
        now: newest loss, NaN if the run diverged.
        step: step of the newest loss.
        perplexity: of base and now, None where not recorded.
        bits_per_byte: of base and now, None where not recorded.
        curve: (step, loss - base), finite points only.
        curve_errors: standard error of each point of the curve, 0 where it was not recorded.
        error: standard error of the difference, None where it was not recorded.
        paired: the error is of the differences document by document.
        tokens: tokens of the newest validation, None where not recorded.
        documents: documents that they are of.
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
    curve_errors: list[float] = field(default_factory=list)
    error: float | None = None
    paired: bool = False
    tokens: int | None = None
    documents: int | None = None

    @property
    def delta(self) -> float:
        """Nats per token; negative means learned."""
        return self.now - self.base

    @property
    def percent(self) -> float | None:
        """The difference in percent of the base's loss."""
        return 100 * self.delta / self.base if self.base else None

    @property
    def verdict(self) -> str:
        """The difference in words; learned and forgotten only beyond two standard errors."""
        if self.step == self.base_step and not math.isnan(self.delta):
            return NOT_TRAINED
        return name_change(self.delta, self.error)

    @property
    def text(self) -> str:
        """The difference with two standard errors."""
        return format_change(self.delta, None if self.step == self.base_step else self.error)


@dataclass(frozen=True)
class DomainTokens:
    """Tokens of one domain of the blend, planned and consumed: number, share of all tokens, epochs."""

    domain: str
    role: str
    planned: float | None
    planned_share: float | None
    planned_epochs: float | None
    consumed: float | None
    consumed_share: float | None
    consumed_epochs: float | None


@dataclass(frozen=True)
class Throughput:
    """Statistics of the logged intervals, without the first, which holds the start-up.

    Args:
        tokens_per_second: median, over all ranks.
        step_p50: median seconds per step.
        step_p99: 99th percentile of the seconds per step.
        memory_gib: largest recorded memory: reserved on the GPU, or resident in the process on a CPU.
        elapsed_s: seconds of training, validation left out.
    """

    tokens_per_second: float | None
    step_p50: float | None
    step_p99: float | None
    memory_gib: float | None
    elapsed_s: float | None


@dataclass(frozen=True)
class Progress:
    """How far a run is: newest logged step and planned steps, None where not recorded; whether it failed."""

    step: int | None
    planned: int | None
    failed: bool = False

    @property
    def unfinished(self) -> bool:
        """Steps of the plan are missing."""
        return self.step is not None and self.planned is not None and self.step < self.planned

    def __str__(self) -> str:
        if self.failed:
            return f"failed after step {self.step or 0:,} of {self.planned or 0:,}"
        if self.step is None:
            return "no training step recorded"
        if self.planned is None:
            return f"at step {self.step:,}"
        return (
            f"unfinished, step {self.step:,} of {self.planned:,}"
            if self.unfinished
            else f"finished, {self.step:,} steps"
        )


def get_progress(files: RunFiles) -> Progress:
    """The newest logged step beside trainer.max_steps."""
    planned = finite(files.at("trainer.max_steps"))
    failed = files.status is not None and files.status.phase == FAILED
    return Progress(files.train[-1]["step"] if files.train else None, int(planned) if planned else None, failed)


def compute_changes(files: RunFiles) -> list[DomainChange]:
    """One entry per validated domain: new domains first, then in the order of the file."""
    seen: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for row in files.validation:
        for domain, values in _validated_domains(row).items():
            if number(values.get("loss")) is not None:
                seen.setdefault(domain, []).append((row["step"], values))
    if len(seen) > 1:
        seen.pop(ALL, None)
    roles = {str(d.get("name")): str(d.get("role", "")) for d in (*blend_domains(files), *_validated_only(files))}
    changes = [_compute_change(domain, roles.get(domain, ""), points) for domain, points in seen.items()]
    return sorted(changes, key=lambda c: {"new": 0, "replay": 1, "watch": 2}.get(c.role, 3))


def _validated_domains(row: Row) -> dict[str, dict[str, Any]]:
    """Domain -> {"loss", "perplexity", "bits_per_byte"} of one validation row."""
    split = row.get("validation")
    if isinstance(split, dict) and split:
        return {name: value for name, value in split.items() if isinstance(value, dict)}
    return {ALL: {"loss": row["val_loss"]}} if "val_loss" in row else {}


def _compute_change(domain: str, role: str, points: list[tuple[int, dict[str, Any]]]) -> DomainChange:
    (first, start), (last, end) = points[0], points[-1]
    base = float(start["loss"])
    shown = [(step, v) for step, v in points if math.isfinite(float(v["loss"]) - base)]
    curve = [(step, float(v["loss"]) - base) for step, v in shown]
    perplexity = finite(start.get("perplexity")), finite(end.get("perplexity"))
    bits = finite(start.get("bits_per_byte")), finite(end.get("bits_per_byte"))
    errors = [_change_error(start, v, first)[0] or 0.0 for _, v in shown]
    error, paired = _change_error(start, end, first)
    newest = read_domain_loss(end)
    return DomainChange(
        *(domain, role, base, first, float(end["loss"]), last, perplexity, bits, curve, errors, error, paired),
        tokens=newest.tokens if newest else None,
        documents=newest.documents if newest else None,
    )


def _change_error(start: dict[str, Any], end: dict[str, Any], first_step: int) -> tuple[float | None, bool]:
    """The standard error of the change between two validations of a domain, and whether it is paired."""
    before, after = read_domain_loss(start), read_domain_loss(end)
    return change_error(before, after, first_step) if before and after else (None, False)


def baseline_name(files: RunFiles, changes: list[DomainChange]) -> str:
    """What the differences are relative to: "base model", "untrained model" or "first validation"."""
    if any(c.base_step for c in changes):
        return "first validation"
    return "base model" if files.continued else "untrained model"


def blend_domains(files: RunFiles) -> list[dict[str, Any]]:
    """The entries of blend.json."""
    domains = files.records.get("blend.json", {}).get("domains")
    return [d for d in domains if isinstance(d, dict)] if isinstance(domains, list) else []


def _validated_only(files: RunFiles) -> list[dict[str, Any]]:
    """The domains of blend.json that are validated and not trained on."""
    domains = files.records.get("blend.json", {}).get("validated_only")
    return [d for d in domains if isinstance(d, dict)] if isinstance(domains, list) else []


def describe_other_base(one: RunFiles, other: RunFiles) -> str:
    """How the model that `other` began with differs from that of `one`; empty where they began alike.

    Two runs from one base have the same record of it, and nearly the same loss at their first validation.
    """
    mine, theirs = one.records.get("base.json", {}), other.records.get("base.json", {})
    if one.continued != other.continued:
        return "one of them began untrained"
    if one.continued and mine.get("fingerprint") != theirs.get("fingerprint"):
        return f"{theirs.get('source', '?')} instead of {mine.get('source', '?')}"
    before = {change.domain: change for change in compute_changes(one)}
    for change in compute_changes(other):
        first = before.get(change.domain)
        if first is not None and first.base_step != change.base_step:
            return f"first validated at step {change.base_step:,} instead of {first.base_step:,}"
        if first is not None and not abs(first.base - change.base) <= SAME_BASE:
            return f"{change.domain} began at {change.base:.3f} instead of {first.base:.3f} nats per token"
    return ""


def compute_tokens(files: RunFiles) -> list[DomainTokens]:
    """Planned and consumed tokens, one entry per domain of the blend."""
    domains = blend_domains(files)
    counted = [row["consumed_tokens"] for row in files.train if isinstance(row.get("consumed_tokens"), dict)]
    consumed = counted[-1] if counted else {}
    planned = {str(d.get("name")): finite(d.get("tokens_planned")) for d in domains}
    all_planned = sum(v or 0.0 for v in planned.values())
    all_consumed = sum(finite(v) or 0.0 for v in consumed.values())
    found = []
    for d in domains:
        name = str(d.get("name"))
        plan, used = planned[name], finite(consumed.get(name))
        found.append(
            DomainTokens(
                domain=name,
                role=str(d.get("role", "")),
                planned=plan,
                planned_share=_ratio(plan, all_planned),
                planned_epochs=finite(d.get("epochs_planned")),
                consumed=used,
                consumed_share=_ratio(used, all_consumed),
                consumed_epochs=_ratio(used, finite(d.get("tokens_available"))),
            )
        )
    return found


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def planned_replay_share(files: RunFiles) -> float | None:
    """Planned share of replayed tokens, 0 to 1."""
    return finite(files.records.get("blend.json", {}).get("replay_share"))


def get_series(rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one column, finite values only."""
    points = [(row["step"], value) for row in rows if (value := finite(row.get(key))) is not None]
    return [step for step, _ in points], [value for _, value in points]


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile; None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


def compute_throughput(files: RunFiles) -> Throughput:
    """Medians and extremes of what was logged."""
    rows = files.train[1:] if len(files.train) > 2 else files.train
    seconds = get_series(rows, "step_seconds")[1]
    steps, all_seconds = get_series(files.train, "step_seconds")
    interval_lengths = [b - a for a, b in zip([0, *steps], steps, strict=False)]
    return Throughput(
        tokens_per_second=percentile(get_series(rows, "tokens_per_second")[1], 0.5),
        step_p50=percentile(seconds, 0.5),
        step_p99=percentile(seconds, 0.99),
        memory_gib=max(get_series(files.train, "memory_gib")[1], default=None),
        elapsed_s=sum(n * s for n, s in zip(interval_lengths, all_seconds, strict=True)) or None,
    )


def smooth(values: list[float]) -> list[float]:
    """Average over about a twenty-fifth of the curve around each point, so that the average does not lag behind."""
    half, sums = max(1, len(values) // 50), [0.0, *itertools.accumulate(values)]
    ends = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in ends]


def find_spikes(files: RunFiles) -> list[int]:
    """Steps whose loss is half a nat and eight typical deviations above the twenty rows logged before it."""
    steps, losses = get_series(files.train, "loss")
    found = []
    for i in range(5, len(losses)):
        before = losses[max(0, i - 20) : i]
        middle = statistics.median(before)
        spread = 1.4826 * statistics.median(abs(v - middle) for v in before)  # standard deviation of normal noise
        if losses[i] - middle > max(0.5, 8 * spread):
            found.append(steps[i])
    return found
