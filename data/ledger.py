"""The token ledger of a run: which samples of which corpus its weights have read, in which stage and attempt.

It is saved with every checkpoint and continued from there. What is read next follows from it, so a switch of stages, a
resumed run and a changed blend repeat nothing by accident and leave nothing out in silence. Imports no torch.

The samples of a corpus are its windows of seq_length tokens. One reading of all of them is a pass; within a pass the
order is fixed by the seed, so `first` and `end` of a range name the windows that were read. A run without stages reads
in Megatron-Core's order, which lays several epochs out together: there the first pass is what Megatron has laid out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.errors import UserError
from common.json_files import parse_json
from data.blend_math import stage_weights
from data.budget import BudgetState
from data.sample_order import Segment

FILE_NAME = "ledger.json"
VERSION = 1
Order = Literal["megatron", "ledger"]


@dataclass(frozen=True)
class Corpus:
    """A corpus that the run has read from, or will.

    Args:
        name: the domain's name in the blend.
        role: "new" or "replay".
        folder: as the blend names it.
        content: SHA-256 of its train.bin.
        windows: samples of one reading: (tokens - 1) // seq_length; the rest is left out of that reading.
        laid_out: samples that Megatron was asked for, if the run began in its order.
        laid_out_size: samples in that order, which is the first pass.
    """

    name: str
    role: str
    folder: str
    content: str
    windows: int
    laid_out: int | None = None
    laid_out_size: int = 0

    def locate(self, number: int) -> tuple[int, int]:
        """Pass and place in it of the corpus's sample `number`, counted from the start of the run."""
        if number < self.laid_out_size:
            return 0, number
        rest = divmod(number - self.laid_out_size, self.windows)
        return rest[0] + (1 if self.laid_out_size else 0), rest[1]

    def number(self, pass_number: int, place: int) -> int:
        """The sample at a place of a pass, counted from the start of the run: what `locate` turns around."""
        if pass_number == 0 or not self.laid_out_size:
            return pass_number * self.windows + place
        return self.laid_out_size + (pass_number - 1) * self.windows + place

    def size_of(self, pass_number: int) -> int:
        """Samples of a pass."""
        return self.laid_out_size if pass_number == 0 and self.laid_out_size else self.windows


@dataclass(frozen=True)
class StageEntry:
    """A stage as it is, or will be, read.

    Args:
        name: of the stage.
        first: its first step.
        replay_share: share of its tokens that replay old text.
        within: domain -> share of the tokens of its role.
        order: who orders the samples.
        attempt: the attempt that wrote this entry.
        change: why it is here, if the blend was changed by a resume; else empty.
        begins: corpus -> samples read before it; only where `change` is not empty, since it follows from the rest.
        decided: the step whose validation decided this share, by a forgetting budget; None for a stage of the blend.
    """

    name: str
    first: int
    replay_share: float
    within: dict[str, float]
    order: Order = "ledger"
    attempt: int = 1
    change: str = ""
    begins: dict[str, int] = field(default_factory=dict)
    decided: int | None = None

    def same_shares(self, other: StageEntry) -> bool:
        """Whether both read the same shares under the same name."""
        mine, theirs = (self.name, self.replay_share, self.within), (other.name, other.replay_share, other.within)
        return mine == theirs


@dataclass(frozen=True)
class Attempt:
    """An attempt at the run: its number, its first step, and the samples of each corpus read before it."""

    number: int
    first: int
    read: dict[str, int]


@dataclass(frozen=True)
class Range:
    """What one stage of one attempt has read of a corpus.

    Args:
        step: the first step of it.
        first_pass, first: pass and place in it of the first sample.
        last_pass, end: pass of the last sample, and the place after it.
        samples: from the first to the last.
    """

    stage: str
    attempt: int
    step: int
    corpus: str
    first_pass: int
    first: int
    last_pass: int
    end: int
    samples: int


@dataclass(frozen=True)
class Ledger:
    """What was read by step `step`, and what will be read after it.

    Args:
        step: completed steps.
        seed: of the order of the samples.
        seq_length: tokens per sample.
        global_batch_size: samples per step.
        corpora: every corpus that was ever in the blend, in the order in which they came.
        stages: by their first step; the last one lasts to the end of the run.
        attempts: in their order.
        read: corpus -> samples read by `step`.
        budget: where a forgetting budget moves the replay share, what its next decision follows from.
    """

    step: int
    seed: int
    seq_length: int
    global_batch_size: int
    corpora: tuple[Corpus, ...]
    stages: tuple[StageEntry, ...]
    attempts: tuple[Attempt, ...]
    read: dict[str, int]
    budget: BudgetState | None = None

    @property
    def order(self) -> Order:
        """Who orders the samples from `step` on."""
        return self.stage_at(self.step).order

    @property
    def stages_ahead(self) -> tuple[StageEntry, ...]:
        """The stage of `step` and those after it."""
        return (self.stage_at(self.step), *(stage for stage in self.stages if stage.first > self.step))

    def stage_at(self, step: int) -> StageEntry:
        """The stage of optimizer step `step`."""
        return [stage for stage in self.stages if stage.first <= step][-1]

    def segments(self) -> tuple[Segment, ...]:
        """The stretches of fixed shares that are read in the ledger's order.

        Raises:
            ValueError: a stage in Megatron's order, whose end the ledger does not know.
        """
        roles = {corpus.name: corpus.role for corpus in self.corpora}
        found: list[Segment] = []
        for stage in self.stages:
            if stage.order != "ledger":
                continue
            shares = stage_weights(stage.within, stage.replay_share, roles)
            weights = tuple(shares.get(corpus.name, 0.0) for corpus in self.corpora)
            if stage.change or not found:
                begins = tuple(stage.begins.get(corpus.name, 0) for corpus in self.corpora)
            else:
                begins = found[-1].counts_at(stage.first, self.global_batch_size)
            found.append(Segment(stage.first, weights, begins))
        return tuple(found)

    def counts_at(self, step: int) -> dict[str, int]:
        """Corpus -> samples read before `step`, where the ledger's own order tells."""
        segment = [one for one in self.segments() if one.first <= step][-1]
        counts = segment.counts_at(step, self.global_batch_size)
        return {corpus.name: count for corpus, count in zip(self.corpora, counts, strict=True)}

    def with_share(self, share: float, first: int, decided: int) -> Ledger:
        """The ledger with another replay share from step `first` on, in the stage of that step and in all after it.

        Args:
            decided: the step whose validation decided it.
        """
        now = self.stage_at(first)
        if now.first < first:
            now = dataclasses.replace(now, first=first, change="", begins={}, decided=decided)
        stages = [*(one for one in self.stages if one.first < first), now]
        stages += [one for one in self.stages if one.first > first]
        changed = [dataclasses.replace(one, replay_share=share) if one.first >= first else one for one in stages]
        return dataclasses.replace(self, stages=tuple(changed))

    def at(self, step: int, read: Mapping[str, int] | None = None) -> Ledger:
        """The ledger after `step` steps.

        Args:
            read: corpus -> samples read, for Megatron's order; the ledger's own is computed.
        """
        return dataclasses.replace(self, step=step, read=dict(read) if read is not None else self.counts_at(step))

    def ranges(self) -> list[Range]:
        """What was read by `step`: by stage, attempt and corpus, in the order of the steps."""
        marks = {attempt.first: attempt.read for attempt in self.attempts} | {self.step: self.read}
        marks |= {stage.first: stage.begins for stage in self.stages if stage.change}
        for stage in self.stages:
            if stage.first < self.step and stage.first not in marks and stage.decided is None:
                marks[stage.first] = self.counts_at(stage.first) if stage.first else {}
        steps = sorted(step for step in marks if step <= self.step)
        found = []
        for start, end in zip(steps[:-1], steps[1:], strict=True):
            attempt = [one for one in self.attempts if one.first <= start][-1].number
            for corpus in self.corpora:
                begin, stop = marks[start].get(corpus.name, 0), marks[end].get(corpus.name, 0)
                if begin < stop:
                    last_pass, last = corpus.locate(stop - 1)
                    place = (*corpus.locate(begin), last_pass, last + 1)
                    found.append(Range(self.stage_at(start).name, attempt, start, corpus.name, *place, stop - begin))
        return found

    def key(self, corpus: Corpus, pass_number: int) -> int:
        """The key of the permutation of a pass; pass 0 is in the shuffled order of Megatron's windows."""
        text = f"{self.seed}/{corpus.content}/{pass_number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def to_json(self) -> str:
        """The content of ledger.json; `ranges` is there for readers, and follows from the rest."""
        rows = [{**dataclasses.asdict(one), "tokens": one.samples * self.seq_length} for one in self.ranges()]
        return json.dumps({"version": VERSION, **dataclasses.asdict(self), "ranges": rows}, indent=1) + "\n"


def parse_ledger(text: str) -> Ledger:
    """Read what `Ledger.to_json` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is no ledger of this version.
    """
    raw = parse_json(text)
    if raw.pop("version") != VERSION:
        raise ValueError(f"not a ledger of version {VERSION}")
    raw.pop("ranges")
    kinds = {"corpora": Corpus, "stages": StageEntry, "attempts": Attempt}
    budget = raw.pop("budget", None)
    raw["budget"] = None if budget is None else BudgetState(**budget)
    return Ledger(**{**raw, **{key: tuple(kind(**row) for row in raw[key]) for key, kind in kinds.items()}})


def read_ledger(path: Path) -> Ledger:
    """The ledger of a checkpoint or of a run.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    try:
        return parse_ledger(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} does not say what the run has read",
            expected="the token ledger of the checkpoint",
            found="no such file: an earlier version saved the checkpoint" if not path.exists() else str(error),
            do="resume without another blend, save a checkpoint, and change the blend then",
        ) from None


def stage_entries(rows: Sequence[Mapping[str, Any]]) -> tuple[StageEntry, ...]:
    """The stages of a run as `data.stages` holds them."""
    return tuple(StageEntry(**row) for row in rows)
