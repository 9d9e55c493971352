"""Warnings about a training, each with the work that it rests on: for the plan before it and the report after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from data.blend_math import EPOCHS_CAP

MUENNIGHOFF = "Muennighoff et al. 2023, arXiv 2305.16264"
OVERTRAINED = "Springer et al. 2025, arXiv 2503.19206; Liew and Kato 2025, arXiv 2510.06548"
REPLAY_HELPS = "arXiv 2603.04964, a model of 150M parameters on 4M tokens; Ibrahim et al. 2024, arXiv 2403.08763"
SMALL_CORPUS = 100_000_000  # tokens; judgement: the study had 4M
OVERTRAINED_RATIO = 2000  # tokens per parameter; judgement: a hundred times the 20 that are compute-optimal
# tokens that a released model was pretrained on, by the last part of its name
PRETRAINED_TOKENS = {"qwen2.5-0.5b": (18e12, "Qwen2.5 technical report, arXiv 2412.15115")}
PRETRAINED_NAMES = {494_032_768: "qwen2.5-0.5b"}  # by the number of parameters


@dataclass(frozen=True)
class Advice:
    """A warning in one sentence, and what it rests on."""

    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the warnings need to know of a training; None or empty where it is not known.

    Args:
        base: the model that it continues, a folder or hub id.
        num_parameters: of the model.
        new_tokens: training tokens that the new corpora hold, once.
        replay_share: of the training tokens, in 0..1.
        epochs: domain -> how often it is read.
        max_lr: peak learning rate.
        tried_lr: the highest peak of an earlier pilot or finished run on this base, and its folder.
    """

    base: str | None = None
    num_parameters: int | None = None
    new_tokens: float | None = None
    replay_share: float | None = None
    epochs: Mapping[str, float] = field(default_factory=dict)
    max_lr: float | None = None
    tried_lr: tuple[float, str] | None = None


def advise(facts: Facts) -> list[Advice]:
    """Every warning that the facts give reason for."""
    return [*_epochs(facts), *_overtrained(facts), *_no_replay(facts), *_untried_rate(facts)]


def _epochs(facts: Facts) -> Iterator[Advice]:
    for name, epochs in facts.epochs.items():
        if epochs > EPOCHS_CAP:
            yield Advice(
                f"{name} is read {epochs:.1f} times: beyond {EPOCHS_CAP:g} epochs repeated tokens teach little",
                MUENNIGHOFF,
            )


def _overtrained(facts: Facts) -> Iterator[Advice]:
    if facts.base is None or facts.num_parameters is None:
        return
    name, known = facts.base.rstrip("/").rpartition("/")[2].lower(), "the base was"
    if name not in PRETRAINED_TOKENS:  # a local copy may have any name
        name = PRETRAINED_NAMES.get(facts.num_parameters, "")
        known = f"the base has the size of {name}, which was"
    if name not in PRETRAINED_TOKENS:
        return
    tokens, source = PRETRAINED_TOKENS[name]
    ratio = tokens / facts.num_parameters
    if ratio > OVERTRAINED_RATIO:
        yield Advice(
            f"{known} pretrained on {tokens / 1e12:g}T tokens, {ratio:,.0f} per parameter: models trained for so"
            " long gain less from further tokens and lose more of what they know, so keep the learning rate low and"
            " watch old text",
            f"{OVERTRAINED}; {source}",
        )


def _no_replay(facts: Facts) -> Iterator[Advice]:
    small = facts.new_tokens is not None and facts.new_tokens < SMALL_CORPUS
    if facts.base is not None and small and not facts.replay_share:
        yield Advice(
            f"nothing is replayed, and the new text has only {facts.new_tokens:,.0f} tokens: on small corpora replay"
            " also lowered the loss on the new text",
            REPLAY_HELPS,
        )


def _untried_rate(facts: Facts) -> Iterator[Advice]:
    if facts.max_lr is None or facts.tried_lr is None:
        return
    highest, run = facts.tried_lr
    if facts.max_lr > highest * 1.0001:
        yield Advice(
            f"the peak learning rate {facts.max_lr:g} is above all that pilots and finished runs on this base"
            f" have tried (up to {highest:g}): try it in a short run first",
            f"measured here: {run}",
        )
