"""Counts and sizes as people write them."""

from __future__ import annotations

import re

from common.errors import UserError

GIB = 2**30  # bytes
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_count(text: str, option: str) -> int:
    """A positive whole number such as `500000`, `262_144`, `2B`, `1.5M` or `1e9`.

    Args:
        option: what the number is for, named in the error.

    Raises:
        UserError: not such a number.
    """
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d+)?)([kmbt]?)", text.strip().lower())
    count = round(float(match[1].replace("_", "")) * _FACTORS[match[2]]) if match else 0
    if count < 1:
        raise UserError(
            f"{option}: cannot read {text!r}",
            expected="a positive number such as 500000, 262_144, 2B or 1.5M",
            found=repr(text),
            do=f"{option} 2B",
        )
    return count


def format_bytes(count: float) -> str:
    """A size in the unit that shows it best: `512 B`, `14.0 MiB`, `3.2 GiB`."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float, *, compact: bool = False) -> str:
    """A duration in its two largest units: `42 s`, `12 min 05 s`, `3 h 12 min`, `2 d 03 h`.

    Args:
        compact: without spaces, for a line that has little space: `42s`, `12m05s`, `3h12m`, `2d03h`.
    """
    whole, minute = max(0, int(seconds)), "m" if compact else "min"
    words = [str(whole), "s"]
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, minute), (60, minute, 1, "s")):
        if whole >= size:
            words = [str(whole // size), unit, f"{whole % size // part:02d}", smaller]
            break
    return ("" if compact else " ").join(words)
