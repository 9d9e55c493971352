"""What a blend comes to: tokens, epochs, paths for NeMo, and the order in which Megatron-Core draws samples.

Standard library alone (and numpy, where Megatron's sums are repeated to the last bit). No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from data.manifest import SPLITS

Role = Literal["new", "replay"]


@dataclass(frozen=True)
class ResolvedDomain:
    """A domain with its numbers; tokens are those of the train split, EOD included.

    Args:
        weight: share of all training tokens, in 0..1; the domains' weights sum to 1.
        epochs_planned: tokens_planned / tokens_available.
        bytes_per_token: UTF-8 bytes of text a token stands for (bits per byte = nats / ln 2 / this).
        splits: the splits that hold tokens.
    """

    name: str
    role: Role
    folder: Path
    weight: float
    tokens_available: int
    tokens_planned: int
    epochs_planned: float
    bytes_per_token: float
    splits: tuple[str, ...]


@dataclass(frozen=True)
class ResolvedBlend:
    """What a blend comes to over `total_tokens` tokens."""

    domains: tuple[ResolvedDomain, ...]
    replay_share: float
    total_tokens: int
    warnings: tuple[str, ...]

    @property
    def weights(self) -> list[float]:
        return [domain.weight for domain in self.domains]

    @property
    def tokenizer(self) -> Path:
        """The tokenizer folder that all domains share."""
        return self.domains[0].folder / "tokenizer"

    @property
    def paths(self) -> dict[str, list[str]]:
        """For NeMo's PreTrainingDataModule: weight, prefix, weight, prefix, ... of each split.

        Domains that have no tokens in a split are left out of it: Megatron loops for ever over an empty one.
        """
        return {split: self._zipped(split) for split in SPLITS}

    def _zipped(self, split: str) -> list[str]:
        have = [domain for domain in self.domains if split in domain.splits]
        return [word for domain in have for word in (repr(domain.weight), str(domain.folder / split))]

    def to_json(self) -> str:
        """The text of runs/NAME/blend.json."""
        rows = [{key: value for key, value in asdict(domain).items() if key != "splits"} for domain in self.domains]
        whole = {"domains": rows, "replay_share": self.replay_share, "total_tokens": self.total_tokens}
        return json.dumps(whole, indent=2, default=str, ensure_ascii=False) + "\n"

    def table(self) -> list[str]:
        """Printable lines: a head, one line a domain, a sum, the warnings."""
        width = max(6, *(len(domain.name) for domain in self.domains))
        row = f"{{:<{width}}}  {{:<6}}  {{:>7}}  {{:>15}}  {{:>15}}  {{:>7}}"
        lines = [row.format("domain", "role", "share", "tokens in it", "tokens planned", "epochs")]
        for d in self.domains:
            share, epochs = f"{100 * d.weight:.2f}%", f"{d.epochs_planned:.2f}"
            lines.append(row.format(d.name, d.role, share, f"{d.tokens_available:,}", f"{d.tokens_planned:,}", epochs))
        available = sum(d.tokens_available for d in self.domains)
        lines.append(row.format("all", "", "100.00%", f"{available:,}", f"{self.total_tokens:,}", ""))
        return [*lines, *(f"warning: {line}" for line in self.warnings)]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers that sum to `total`, each less than 1 from its exact share (largest remainders first)."""
    scale = sum(map(Fraction, weights))
    exact = [total * Fraction(weight) / scale for weight in weights]
    found = [math.floor(share) for share in exact]
    order = sorted(range(len(found)), key=lambda i: (found[i] - exact[i], i))
    for i in order[: total - sum(found)]:
        found[i] += 1
    return found


def planned_samples(weights: Sequence[float], n: int) -> list[int]:
    """Samples that each dataset gives to the first `n` samples of a blend, in Megatron-Core's own order.

    `BlendedDataset` draws, at sample i, from the dataset that lags most behind weight * max(i, 1) (the
    first of equals); no randomness, and what comes later changes nothing: the first n are the same
    however long the run. So after any step, n = steps * global batch size must match to the sample.
    Weights are divided by their sum twice, as Megatron's builder and its dataset each do it (a last bit
    can decide between equals). About 0.3 us * len(weights) a sample.
    """
    import numpy as np

    shares = np.asarray(weights, dtype=np.float64)
    for _ in range(2):
        shares = shares / np.sum(shares)
    goals: list[float] = shares.tolist()
    drawn = [0] * len(goals)
    others = range(1, len(goals))
    for index in range(n):
        at = float(max(index, 1))
        best, most = 0, goals[0] * at - drawn[0]
        for i in others:
            lag = goals[i] * at - drawn[i]
            if lag > most:
                best, most = i, lag
        drawn[best] += 1
    return drawn
