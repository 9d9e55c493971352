"""What the launcher does once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def _count_parsed_words(sample: Path) -> list[str]:
    """Run two steps in this process; every word that was read as an override, in order."""
    from recipes import overrides

    parsed: list[str] = []
    parse_word = overrides._parse

    def counting(word: str) -> overrides.Override:
        parsed.append(word)
        return parse_word(word)

    overrides._parse = counting
    train(sample, *SHORT, "trainer.max_steps=2", "optim.lr_scheduler.decay_end=50")
    return parsed


def test_overrides_are_parsed_once_per_launch(sample: Path, forked: Callable[..., list[str]]) -> None:
    parsed = forked(_count_parsed_words, sample)
    assert "trainer.max_steps=2" in parsed
    assert len(parsed) == len(set(parsed)), parsed
