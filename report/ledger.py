"""What the token ledger of a run says: tokens by stage and domain for the report, and an item of the passport."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from data.ledger import Ledger, parse_ledger
from report.item import Item
from report.read import RunFiles, at, finite

NAME = "token ledger"
EXPECTED = "each reading begins where the one before ended, and the tokens that the ranks counted"


@dataclass(frozen=True)
class StageRow:
    """What one stage of one attempt has read of one domain.

    Args:
        first: the first step of that stage in that attempt.
        planned: tokens planned for the whole stage, None where the blend has another plan now.
        share: of the tokens that this stage has read in this attempt.
        readings: how often the domain had been read at the end of it, from the start of the run.
        change: why the stage is there, if the blend was changed by a resume.
    """

    stage: str
    attempt: int
    first: int
    domain: str
    planned: float | None
    tokens: int
    share: float
    readings: float
    change: str


def read_ledger(files: RunFiles) -> Ledger | None:
    """The ledger of a run; None if there is none, or if it cannot be read."""
    try:
        return parse_ledger(json.dumps(files.records["ledger.json"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def stage_rows(files: RunFiles) -> list[StageRow]:
    """The table of the report; empty for a run of one stage, whose tokens the blend's table has."""
    ledger = read_ledger(files)
    if ledger is None or len(ledger.stages) < 2:
        return []
    ranges, rows, read = ledger.ranges(), [], dict.fromkeys((c.name for c in ledger.corpora), 0)
    windows = {corpus.name: corpus.windows for corpus in ledger.corpora}
    for one in ranges:
        together = sum(other.samples for other in ranges if other.step == one.step)
        read[one.corpus] += one.samples
        stage = ledger.stage_at(one.step)
        rows.append(
            StageRow(
                stage=one.stage,
                attempt=one.attempt,
                first=one.step,
                domain=one.corpus,
                planned=_planned(files, one.stage, stage.first, one.corpus),
                tokens=one.samples * ledger.seq_length,
                share=one.samples / together,
                readings=read[one.corpus] / windows[one.corpus],
                change=stage.change,
            )
        )
    return rows


def _planned(files: RunFiles, stage: str, first: int, domain: str) -> float | None:
    """Tokens that blend.json plans for a domain in a stage that begins where the ledger's does."""
    for row in files.records.get("blend.json", {}).get("stages") or []:
        if isinstance(row, dict) and row.get("name") == stage and row.get("first") == first:
            return finite(at(row, f"tokens_planned.{domain}"))
    return None


def check_ledger(files: RunFiles) -> Iterator[Item]:
    """The item of the passport; none for a run without a ledger, such as one of an earlier version."""
    if "ledger.json" not in files.records:
        return
    ledger = read_ledger(files)
    if ledger is None:
        yield Item(NAME, "fail", EXPECTED, "ledger.json cannot be read")
        return
    problems = [*_gaps(ledger), *_other_counts(files, ledger)]
    decided = sum(stage.decided is not None for stage in ledger.stages)
    planned = len(ledger.stages) - decided
    stages = "1 stage" if planned == 1 else f"{planned} stages"
    stages += f", {decided} shares decided by the forgetting budget," if decided else ""
    tokens = ", ".join(f"{name} {samples * ledger.seq_length:,}" for name, samples in ledger.read.items())
    changes = [f"changed at step {stage.first}: {stage.change}" for stage in ledger.stages if stage.change]
    found = "; ".join([f"{stages} up to step {ledger.step}", f"tokens: {tokens}", *changes])
    yield Item(NAME, "fail" if problems else "pass", EXPECTED, "; ".join(problems) or found)


def _gaps(ledger: Ledger) -> Iterator[str]:
    ends: dict[str, int] = {}
    for one in ledger.ranges():
        corpus = next(corpus for corpus in ledger.corpora if corpus.name == one.corpus)
        expected = corpus.locate(ends.get(one.corpus, 0))
        if (one.first_pass, one.first) != expected:
            yield f"{one.corpus}: stage {one.stage} begins at sample {one.first}, not {expected[1]}"
        ends[one.corpus] = ends.get(one.corpus, 0) + one.samples
    if ends != {name: samples for name, samples in ledger.read.items() if samples}:
        yield f"ranges of {ends} samples, and {ledger.read} read"


def _other_counts(files: RunFiles, ledger: Ledger) -> Iterator[str]:
    """What the ranks counted at the ledger's step, where every token carries loss."""
    if finite(files.records.get("gates.json", {}).get("loss_mask_share")) != 1.0:
        return
    row = next((row for row in files.train if row["step"] == ledger.step), {})
    counted = row.get("consumed_tokens")
    for name, tokens in counted.items() if isinstance(counted, dict) else ():
        expected = ledger.read.get(name, 0) * ledger.seq_length
        if not math.isclose(finite(tokens) or 0.0, expected):
            yield f"{name}: the ranks counted {tokens:,} tokens, the ledger {expected:,}"
