"""What a reader of the report should look at first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from common.domain_losses import FORGOTTEN, UNCLEAR
from common.run_status import FAILED
from launcher.earlier_runs import highest_rate
from recipes.advice import Facts, advise
from report.analysis import (
    DomainChange,
    DomainTokens,
    blend_domains,
    find_spikes,
    get_progress,
    planned_replay_share,
)
from report.read import RunFiles, finite, number

MUCH = 0.1  # nats per token, on a domain that is not new
HOT = 0.05  # share of the samples of the GPUs
DRIFT = 0.02  # difference between planned and consumed share of tokens


def find_warnings(files: RunFiles, changes: list[DomainChange], tokens: list[DomainTokens]) -> list[str]:
    """One sentence for each, the most serious first."""
    drift = _tokens(tokens) if not _has_stages(files) else ()
    return [*_training(files), *_validation(changes), *_advice(files, tokens), *drift, *_state(files)]


def _format_steps(steps: list[int]) -> str:
    more = f" and {len(steps) - 5} more" if len(steps) > 5 else ""
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(f"{s:,}" for s in steps[:5]) + more


def _training(files: RunFiles) -> Iterator[str]:
    for key, name in (("loss", "Training loss"), ("grad_norm", "Gradient norm")):
        values = [(row["step"], number(row.get(key))) for row in files.train]
        if broken := [step for step, value in values if value is not None and not math.isfinite(value)]:
            yield f"{name} is not a finite number at {_format_steps(broken)}."
    if spikes := find_spikes(files):
        yield f"The loss spikes at {_format_steps(spikes)}: half a nat or more above the rows before."


def _validation(changes: list[DomainChange]) -> Iterator[str]:
    for c in changes:
        if math.isnan(c.delta):
            yield f"The validation loss of {c.domain} is not a number at step {c.step:,}."
        elif c.role == "new" and c.verdict == FORGOTTEN:
            yield f"{c.domain} is the new domain, but its loss rose by {c.delta:.2f} nats per token."
        elif c.verdict == FORGOTTEN and c.delta > MUCH:
            yield (
                f"{c.domain} is forgotten by {c.delta:.2f} nats per token: "
                "consider more replay or a lower peak learning rate."
            )
        elif c.verdict == UNCLEAR:
            yield (
                f"{c.domain}: {c.text} nats per token on {c.tokens or 0:,} tokens of {c.documents or 0:,} documents is"
                " no clear change: validate on more text (trainer.limit_val_batches)."
            )
        if c.base_step:
            yield f"{c.domain} was first validated at step {c.base_step:,}: the zero line is not the base model."


def _advice(files: RunFiles, tokens: list[DomainTokens]) -> Iterator[str]:
    """What published work says against such a training, as the plan said before it (recipes/advice.py)."""
    new = [domain for domain in blend_domains(files) if domain.get("role") == "new"]
    available = [finite(domain.get("tokens_available")) for domain in new]
    parameters = finite(files.records.get("gates.json", {}).get("parameters"))
    base = files.records.get("base.json", {}).get("source")
    facts = Facts(
        base=base if isinstance(base, str) else None,
        num_parameters=int(parameters) if parameters else None,
        new_tokens=sum(value or 0.0 for value in available) if new and None not in available else None,
        replay_share=planned_replay_share(files),
        epochs={t.domain: max(t.planned_epochs or 0.0, t.consumed_epochs or 0.0) for t in tokens},
        max_lr=finite(files.at("optim.config.lr")),
        tried_lr=highest_rate(files.run, base) if isinstance(base, str) else None,
    )
    yield from (f"{advice}." for advice in advise(facts))


def _has_stages(files: RunFiles) -> bool:
    """The shares changed on the way, by stages or by a forgetting budget, so that they are not those of the plan."""
    ledger = files.records.get("ledger.json", {}).get("stages")
    planned = files.records.get("blend.json", {}).get("stages")
    return any(isinstance(stages, list) and len(stages) > 1 for stages in (ledger, planned))


def _tokens(tokens: list[DomainTokens]) -> Iterator[str]:
    for t in tokens:
        if t.consumed_share is not None and t.planned_share is not None:
            drift = t.consumed_share - t.planned_share
            if abs(drift) > DRIFT:
                yield f"{t.domain} made up {t.consumed_share:.1%} of the tokens; {t.planned_share:.1%} were planned."


def _state(files: RunFiles) -> Iterator[str]:
    progress, ending = get_progress(files), files.status.ending if files.status else None
    if ending is not None and files.status is not None and files.status.phase == FAILED:
        where = f"rank {ending.rank} on {ending.host}: " if ending.rank is not None else ""
        advice = f" Do this: {ending.advice}." if ending.advice else ""
        steps = f"step {files.status.step:,} of {files.status.max_steps:,}"
        yield f"This run failed at {steps}: {where}{ending.summary}.{advice}"
    elif progress.step is None:
        yield "No training step is recorded yet."
    elif progress.unfinished:
        yield f"This run is {progress}."
    hot = files.system.hot_share
    if hot is not None and hot > HOT:
        yield f"Heat slowed the GPUs down in {hot:.0%} of the samples: look at the cooling."
    if len(files.run.attempts) > 1:
        yield (
            f"Trained in {len(files.run.attempts)} attempts; steps that were trained twice count once, "
            "as they were trained last."
        )
    if "+changes" in files.version:
        yield "The code had uncommitted changes: this run cannot be repeated from its commit."
    yield from (f"{note}." for note in files.notes)
