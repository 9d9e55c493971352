"""Profiles of continual pretraining: a learning rate, a schedule and an optimizer with a source for each number.

A recipe names its profile once, `@recipe(profile="gentle", ...)`; the plan takes the numbers from here. The replay
share is advice: the blend (data/blend.py) holds the number. "Judgement" marks what no paper gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.errors import UserError, unknown_name
from recipes.schedules import Schedule, build

IBRAHIM = "Ibrahim et al. 2024, arXiv 2403.08763"
PARMAR = "Parmar et al. 2024, arXiv 2407.07263"
HU = "Hu et al. 2024, arXiv 2404.06395"
HAEGELE = "Haegele et al. 2024, arXiv 2405.18392"
LEAST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The numbers of a profile, before a run's length is known.

    Args:
        when: which corpus it is for.
        kind: schedule, a key of `recipes.schedules.KINDS`.
        max_lr: peak learning rate.
        fall: the peak divided by the last learning rate.
        warmup: length of the warm-up, as a share of the run.
        decay: length of the final decay, as a share of the run (wsd); 0: the cosine takes all of it.
        replay: advised share of replay tokens, lowest and highest, in 0..1.
        sources: what each number rests on, as lines.
    """

    when: str
    kind: str
    max_lr: float
    fall: float
    warmup: float
    decay: float
    replay: tuple[float, float]
    sources: tuple[str, ...]


PROFILES: dict[str, Profile] = {
    "gentle": Profile(
        when="text close to what the model knows (a domain of English prose, more of a known language)",
        kind="rewarm_cosine",
        max_lr=2e-5,
        fall=10,
        warmup=0.01,
        decay=0.0,
        replay=(0.05, 0.10),
        sources=(
            f"re-warm over about 1% of the steps, cosine to a tenth: {IBRAHIM}",
            f"replay 5% under a weak shift: {IBRAHIM}; 10% as the upper end: judgement",
            "peak 2e-5: judgement, low enough to forget little",
        ),
    ),
    "strong": Profile(
        when="another language, code, or a format the model has hardly seen, with enough tokens to learn it",
        kind="rewarm_cosine",
        max_lr=1e-4,
        fall=10,
        warmup=0.01,
        decay=0.0,
        replay=(0.25, 0.25),
        sources=(
            f"re-warm over about 1% of the steps, cosine to a tenth: {IBRAHIM}",
            f"replay 25% under a strong shift: {IBRAHIM}",
            "peak 1e-4: judgement; the loss rises at first and comes back (Gupta et al. 2023, arXiv 2308.04014)",
        ),
    ),
    "polish": Profile(
        when="a small corpus of the best data, to end a training with",
        kind="polish",
        max_lr=3e-5,
        fall=100,
        warmup=0.0,
        decay=0.0,
        replay=(0.05, 0.25),
        sources=(
            f"no warm-up, start near the pretraining's minimum lr, cosine to 1/100: {PARMAR}",
            f"bring in the best blend when the lr has fallen to a fifth of its peak: {PARMAR}",
            f"replay by the shift, 5% weak to 25% strong: {IBRAHIM}; peak 3e-5: judgement",
        ),
    ),
    "wsd": Profile(
        when="a run whose length is open: stay stable, and fork and anneal whenever a model is wanted",
        kind="wsd",
        max_lr=5e-5,
        fall=100,
        warmup=0.01,
        decay=0.15,
        replay=(0.05, 0.25),
        sources=(
            f"warm-up, stable, decay over the last 10-20% with the best data: {HU}",
            f"1-sqrt as the shape of the decay: {HAEGELE}",
            f"replay by the shift, 5% weak to 25% strong: {IBRAHIM}",
            "peak 5e-5 and 15%: judgement; half of strong's peak, since it is held for most of the run",
        ),
    ),
}


def profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        UserError: there is none.
    """
    if name not in PROFILES:
        raise unknown_name(
            "profile", name, PROFILES, "--profile gentle (docs/schedules.md: which one when)", typed="--profile {}"
        )
    return PROFILES[name]


def parameters(name: str, max_steps: int) -> dict[str, Any]:
    """Kind and parameters of the schedule of a run of `max_steps` steps (recipes/schedules.py), without its peak."""
    chosen = profile(name)
    if max_steps < LEAST_STEPS:
        raise UserError(
            f"profile {name} over {max_steps} steps",
            expected=f"at least {LEAST_STEPS} steps, so that warm-up and decay have room",
            found=f"max_steps={max_steps}",
            do=f"trainer.max_steps={LEAST_STEPS} or more",
        )
    found: dict[str, Any] = {"kind": chosen.kind, "min_lr": chosen.max_lr / chosen.fall}
    if chosen.warmup:
        found["warmup_steps"] = max(1, round(chosen.warmup * max_steps))
    if not chosen.decay:
        return {**found, "decay_end": max_steps}
    decay_steps = max(1, round(chosen.decay * max_steps))
    return {**found, "fork_step": max_steps - decay_steps, "decay_steps": decay_steps, "decay_shape": "1-sqrt"}


def schedule(name: str, max_steps: int) -> Schedule:
    """The profile's learning-rate curve, without NeMo (for the picture and for preflight)."""
    return build(**{"max_lr": profile(name).max_lr, **parameters(name, max_steps)})


def reasons(name: str, curve: Schedule, max_steps: int) -> list[str]:
    """What the profile sets and why, one printable line each.

    Args:
        curve: the learning rate of the run, which may differ from the profile's by overrides.
    """
    chosen = profile(name)
    low, high = (f"{100 * share:g}%" for share in chosen.replay)
    phases = ", ".join(f"{p.name} {p.first} to {p.end}" for p in curve.phases() if p.first < max_steps)
    return [
        f"profile {name}: for {chosen.when}",
        f"learning rate: {curve.kind}, peak {curve.max_lr:g}, last {curve.lr(max_steps):g}; steps: {phases}",
        "optimizer: AdamW 0.9/0.95, weight decay 0.1, clip 1.0 (as large models are pretrained with)",
        f"replay: {low if low == high else f'{low} to {high}'} of the tokens is advised; the blend decides",
        *(f"source: {line}" for line in chosen.sources),
    ]
