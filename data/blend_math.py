"""The numbers of a blend: tokens, epochs, paths for NeMo, and the order in which Megatron-Core draws samples.

Imports the standard library only, and numpy where Megatron's sums must be repeated to the last bit. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from data.manifest import SPLITS

EPOCHS_CAP = 4.0  # Muennighoff et al. 2023, arXiv 2305.16264: up to 4 epochs are about as good as new text
Role = Literal["new", "replay", "watch"]  # a watched domain is validated and never trained on


@dataclass(frozen=True)
class ResolvedDomain:
    """A domain with its numbers; token counts are those of the train split, end-of-document tokens included.

    Args:
        weight: share of all training tokens, in 0..1; the domains' weights sum to 1.
        epochs_planned: tokens_planned / tokens_available.
        bytes_per_token: mean UTF-8 bytes of text per token (bits per byte = nats / ln 2 / bytes_per_token).
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
class ValidatedDomain:
    """A domain that is validated and not trained on: a watched one, or a replay domain in a run without replay."""

    name: str
    role: Role
    folder: Path


@dataclass(frozen=True)
class ResolvedBlend:
    """A blend with its numbers for a run of `total_tokens` tokens.

    Args:
        domains: those that are trained on.
        validated_only: the others.
    """

    domains: tuple[ResolvedDomain, ...]
    replay_share: float
    total_tokens: int
    warnings: tuple[str, ...]
    validated_only: tuple[ValidatedDomain, ...] = ()

    @property
    def weights(self) -> list[float]:
        return [domain.weight for domain in self.domains]

    @property
    def tokenizer(self) -> Path:
        """The tokenizer folder that all domains share."""
        return self.domains[0].folder / "tokenizer"

    @property
    def paths(self) -> dict[str, list[str]]:
        """For NeMo's PreTrainingDataModule: [weight, prefix, weight, prefix, ...] of each split.

        A domain without tokens in a split is left out of it: Megatron loops for ever over an empty one.
        """
        return {
            split: [
                word
                for domain in self.domains
                if split in domain.splits
                for word in (repr(domain.weight), str(domain.folder / split))
            ]
            for split in SPLITS
        }

    def to_json(self) -> str:
        """The content of runs/NAME/blend.json."""
        rows = [{key: value for key, value in asdict(domain).items() if key != "splits"} for domain in self.domains]
        content = {
            "domains": rows,
            "validated_only": [asdict(domain) for domain in self.validated_only],
            "replay_share": self.replay_share,
            "total_tokens": self.total_tokens,
        }
        return json.dumps(content, indent=2, default=str, ensure_ascii=False) + "\n"

    def table(self) -> list[str]:
        """Printable lines: a header, one line per domain, the totals, the warnings."""
        names = [*(domain.name for domain in self.domains), *(domain.name for domain in self.validated_only)]
        width = max(6, *map(len, names))
        row = f"{{:<{width}}}  {{:<6}}  {{:>7}}  {{:>15}}  {{:>15}}  {{:>7}}"
        lines = [row.format("domain", "role", "share", "tokens in it", "tokens planned", "epochs")]
        for d in self.domains:
            share, epochs = f"{100 * d.weight:.2f}%", f"{d.epochs_planned:.2f}"
            lines.append(row.format(d.name, d.role, share, f"{d.tokens_available:,}", f"{d.tokens_planned:,}", epochs))
        available = sum(d.tokens_available for d in self.domains)
        lines.append(row.format("all", "", "100.00%", f"{available:,}", f"{self.total_tokens:,}", ""))
        lines += [f"{d.name:<{width}}  {d.role:<6}  validated, never trained on" for d in self.validated_only]
        return [*lines, *(f"warning: {line}" for line in self.warnings)]


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into whole numbers by weight, each less than 1 from its exact share (largest-remainder method)."""
    scale = sum(map(Fraction, weights))
    exact = [total * Fraction(weight) / scale for weight in weights]
    found = [math.floor(share) for share in exact]
    order = sorted(range(len(found)), key=lambda i: (found[i] - exact[i], i))
    for i in order[: total - sum(found)]:
        found[i] += 1
    return found


def stage_weights(within: Mapping[str, float], replay_share: float, roles: Mapping[str, str]) -> dict[str, float]:
    """Share of each domain in all tokens: its share within its role, times that of the role."""
    return {
        name: share * (replay_share if roles[name] == "replay" else 1.0 - replay_share)
        for name, share in within.items()
    }


def count_planned_samples(weights: Sequence[float], n: int) -> list[int]:
    """Count how many of the first `n` samples of a blend come from each dataset, in Megatron-Core's order.

    `BlendedDataset` draws sample i from the dataset that lags most behind weight * max(i, 1) (the first of
    equals). There is no randomness, and the length of the run has no influence on the first n samples, so
    after any step n = steps * global batch size must match to the sample.
    Weights are divided by their sum twice, because Megatron's builder and its dataset each do so (the last
    bit can decide between equals). Takes about 0.3 us * len(weights) per sample.
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
