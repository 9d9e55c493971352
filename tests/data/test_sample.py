"""The texts of the sample corpus (building it takes ten seconds, which the fixture `sample` spends once)."""

from __future__ import annotations

import pytest

from data.sample import _join_docstrings, _read_topics, collect_code, collect_prose


@pytest.mark.slow
def test_the_sample_has_enough_of_both_domains() -> None:
    prose, code = list(collect_prose()), list(collect_code())
    assert len(_read_topics()) > 50 and prose[0] and "assert" in prose[0]
    assert sum(map(len, prose)) > 1_500_000 and max(map(len, prose[100:])) < 100_000
    assert 3_000_000 < sum(map(len, code)) <= 6_000_000
    assert list(_join_docstrings(iter(["a" * 3000, "b" * 3000, "c" * 300, "d"]))) == [
        "a" * 3000 + "\n\n" + "b" * 3000,
        "c" * 300 + "\n\nd",
    ]
