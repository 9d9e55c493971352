"""Counts, sizes and durations as people write and read them."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.quantities import format_bytes, format_duration, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    (("2B", 2 * 10**9), ("1.5m", 1_500_000), ("262_144", 262_144), ("1e9", 10**9), ("7", 7)),
)
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--tokens") == count


@pytest.mark.parametrize(
    ("count", "text"), [(1023, "1023 B"), (1024, "1.0 KiB"), (14 << 20, "14.0 MiB"), (3 << 30, "3.0 GiB")]
)
def test_a_size_has_a_unit_that_shows_it(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("text", ("0", "-3", "two", "", "0.2", "2 B x"))
def test_wrong_counts(text: str) -> None:
    with pytest.raises(UserError, match="--tokens: cannot read"):
        parse_count(text, "--tokens")


@pytest.mark.parametrize(
    ("seconds", "text", "compact"),
    [
        (-3, "0 s", "0s"),
        (59.9, "59 s", "59s"),
        (60, "1 min 00 s", "1m00s"),
        (725, "12 min 05 s", "12m05s"),
        (7300, "2 h 01 min", "2h01m"),
        (183600, "2 d 03 h", "2d03h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str, compact: str) -> None:
    assert (format_duration(seconds), format_duration(seconds, compact=True)) == (text, compact)
