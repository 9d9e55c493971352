"""What a reader of the report should look at first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from report.facts import Change, Replay, spikes, status
from report.read import RunFiles, number

EPOCHS = 4.0  # above this, repeated tokens teach little (Muennighoff et al., 2023, arXiv 2305.16264)
FORGOTTEN = 0.1  # nats a token on a replayed or unnamed domain
DRIFT = 0.02  # share of tokens


def warnings(files: RunFiles, changed: list[Change], blend: list[Replay]) -> list[str]:
    """One sentence each, the gravest first."""
    return [*_training(files), *_validation(changed), *_blend(blend), *_state(files)]


def _steps(steps: list[int]) -> str:
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(f"{s:,}" for s in steps[:5]) + more


def _training(files: RunFiles) -> Iterator[str]:
    for key, name in (("loss", "Training loss"), ("grad_norm", "Gradient norm")):
        values = [(row["step"], number(row.get(key))) for row in files.train]
        if broken := [step for step, value in values if value is not None and not math.isfinite(value)]:
            yield f"{name} is not a finite number at {_steps(broken)}."
    if found := spikes(files):
        yield f"The loss spikes at {_steps(found)}: half a nat or more above the rows before."


def _validation(changed: list[Change]) -> Iterator[str]:
    for c in changed:
        if math.isnan(c.delta):
            yield f"The validation loss of {c.domain} is not a number at step {c.step:,}."
        elif c.role == "new" and c.verdict == "forgotten":
            yield f"{c.domain} is the new domain, yet its loss rose by {c.delta:.2f} nats."
        elif c.delta > FORGOTTEN:
            yield f"{c.domain} is forgotten by {c.delta:.2f} nats: consider more replay or a lower peak learning rate."
        if c.base_step:
            yield f"{c.domain} was first validated at step {c.base_step:,}: the zero line is not the base model."


def _blend(blend: list[Replay]) -> Iterator[str]:
    for r in blend:
        epochs = max(r.planned_epochs or 0.0, r.consumed_epochs or 0.0)
        if epochs > EPOCHS:
            yield f"{r.domain} is read {epochs:.1f} times: beyond {EPOCHS:.0f} epochs repeated tokens teach little."
        if r.consumed_share is not None and r.planned_share is not None:
            drift = r.consumed_share - r.planned_share
            if abs(drift) > DRIFT:
                yield f"{r.domain} made up {r.consumed_share:.1%} of the tokens, planned were {r.planned_share:.1%}."


def _state(files: RunFiles) -> Iterator[str]:
    if (now := status(files)).startswith(("unfinished", "no training")):
        yield f"This run is {now}." if now.startswith("unfinished") else "No training step is recorded yet."
    if len(files.run.attempts) > 1:
        yield f"Trained in {len(files.run.attempts)} attempts; steps that were repeated count once, as last trained."
    if "+changes" in files.version:
        yield "The code had changes that were not committed: this run cannot be repeated from its commit."
    yield from (f"{note}." for note in files.notes)
