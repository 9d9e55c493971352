"""What the launcher does once per run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from common.spec import RunSpec
from launcher import launch
from launcher.requests import TrainRequest
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def _count_parsed_words(run: Callable[[], object]) -> list[str]:
    """Run in this process; every word that was read as an override, in order."""
    from recipes import overrides

    parsed: list[str] = []
    parse_word = overrides._parse

    def counting(word: str) -> overrides.Override:
        parsed.append(word)
        return parse_word(word)

    overrides._parse = counting
    run()
    return parsed


def _resume() -> None:
    spec = RunSpec(recipe="qwen25_tiny", name="run", resume=True, overrides=("trainer.max_steps=3",))
    assert launch.launch(spec) == 0


def _train_by_epochs(sample: Path) -> None:
    words = [f"data.paths={sample / 'prose'}", "data.global_batch_size=8"]
    request = TrainRequest(recipe="qwen25_tiny", epochs=0.1, dryrun=True, overrides=words)
    assert launch.launch(request.spec()) == 0


def test_overrides_are_parsed_once_per_launch(sample: Path, forked: Callable[..., list[str]]) -> None:
    """Also those that a resumed run has recorded, and those of a run whose corpora are counted first."""
    begin = functools.partial(train, sample, *SHORT, "trainer.max_steps=2", "optim.lr_scheduler.decay_end=50")
    for run, word in (
        (begin, "trainer.max_steps=2"),
        (_resume, "trainer.max_steps=2"),
        (functools.partial(_train_by_epochs, sample), "data.global_batch_size=8"),
    ):
        parsed = forked(_count_parsed_words, run)
        assert word in parsed
        assert len(parsed) == len(set(parsed)), parsed
