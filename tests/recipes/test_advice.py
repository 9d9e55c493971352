"""Each warning, where it begins, and its source."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from recipes.advice import Facts, advise

GOOD = Facts(base="models/mine", num_parameters=10, new_tokens=5e8, replay_share=0.1, epochs={"a": 4.0}, max_lr=1e-4)


def _texts(**changes: Any) -> list[str]:
    return [str(one) for one in advise(dataclasses.replace(GOOD, **changes))]


def test_no_warning_without_a_reason() -> None:
    assert _texts() == [] and advise(Facts()) == []


def test_each_has_a_source() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"epochs": {"a": 4.1, "b": 1.0}}, "a is read 4.1 times"),
        ({"base": "Qwen/Qwen2.5-0.5B", "num_parameters": 494_032_768}, "36,435 per parameter"),
        ({"base": "/models/Qwen2.5-0.5B/", "num_parameters": 494_032_768}, "36,435 per parameter"),
        (
            {"base": "/models/base", "num_parameters": 494_032_768},
            "has the size of qwen2.5-0.5b, which was pretrained on",
        ),
        ({"replay_share": 0.0, "new_tokens": 4e6}, "the new text has only 4,000,000 tokens"),
        ({"tried_lr": (2e-5, "runs/pilot")}, "the peak learning rate 0.0001 is above all"),
    ]
    for changes, words in cases:
        (text,) = _texts(**changes)
        assert words in text and re.search(r"\(.*(arXiv \d{4}\.\d{5}|runs/pilot).*\)$", text)


def test_where_they_end() -> None:
    assert _texts(tried_lr=(1e-4, "runs/pilot")) == []
    assert _texts(replay_share=0.0) == []  # a large corpus
    assert _texts(replay_share=0.0, new_tokens=4e6, base=None) == []  # nothing to forget
