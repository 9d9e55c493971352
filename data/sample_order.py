"""The order in which a run with stages reads its samples: a pure function of the segments, the seed and the step.

A segment is a stretch of steps with fixed shares. Within it the samples come in the order of Webster's method
(Sainte-Lague): sample j of a domain of weight w has its place at (j + 1/2) / w, and all samples are read by their
places. Whatever the number of samples, no domain of m is further than 1/2 + m * w / 2 samples from its exact share, and
none of its samples ever comes back. Imports no torch; numpy only where a batch is laid out.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_CHUNK = 4096  # places of a permutation that are computed at once
_ROUNDS = 6


def count_in_order(weights: Sequence[float], n: int) -> list[int]:
    """How many of the first `n` samples come from each domain; in constant time for any n.

    Args:
        weights: at least one above 0; a domain of weight 0 is not read. They need not sum to 1.
    """
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    read = [i for i, share in enumerate(shares) if share > 0]
    counts = [math.floor(share * n + 0.5) if share > 0 else 0 for share in shares]

    def next_place(i: int) -> tuple[float, int]:
        return (counts[i] + 0.5) / shares[i], i

    def last_place(i: int) -> tuple[float, int]:
        return ((counts[i] - 0.5) / shares[i] if counts[i] else -1.0), i

    while True:
        excess = sum(counts) - n
        first, last = min(map(next_place, read)), max(map(last_place, read))
        if excess > 0:
            counts[last[1]] -= 1
        elif excess < 0:
            counts[first[1]] += 1
        elif last > first:  # rounding has put one sample on the wrong side
            counts[last[1]] -= 1
            counts[first[1]] += 1
        else:
            return counts


def lay_out(weights: Sequence[float], first: int, end: int) -> tuple[Array, Array]:
    """The samples `first` to `end` - 1 of a segment.

    Returns:
        domains: int64[end - first], and numbers: int64[end - first] of the domains' samples, from 0 at the segment's
        start.
    """
    import numpy as np

    total = math.fsum(weights)
    before, after = count_in_order(weights, first), count_in_order(weights, end)
    domains = np.repeat(np.arange(len(weights)), [b - a for a, b in zip(before, after, strict=True)])
    numbers = np.concatenate([np.arange(a, b) for a, b in zip(before, after, strict=True)])
    shares = np.array([weight / total for weight in weights])
    order = np.argsort((numbers + 0.5) / shares[domains], kind="stable")  # equal places: the first domain first
    return domains[order], numbers[order]


@dataclass(frozen=True)
class Segment:
    """A stretch of steps with fixed shares.

    Args:
        first: its first step.
        weights: share of each domain.
        begins: samples of each domain that were read before it.
    """

    first: int
    weights: tuple[float, ...]
    begins: tuple[int, ...]

    def counts_at(self, step: int, global_batch_size: int) -> tuple[int, ...]:
        """Samples of each domain that are read before `step`, which is in this segment or its end."""
        new = count_in_order(self.weights, (step - self.first) * global_batch_size)
        return tuple(begin + count for begin, count in zip(self.begins, new, strict=True))


def samples_of_steps(
    segments: Sequence[Segment], step: int, global_batch_size: int, most: int = 1
) -> tuple[Array, Array]:
    """The global batches from `step` on: of `most` steps, or fewer where the segment of `step` ends before.

    Returns:
        domains: int64[steps * global_batch_size], and numbers: int64 of the same length, of the domains' samples, from
        0 at the start of the run.
    """
    import numpy as np

    after = bisect.bisect_right(segments, step, key=lambda one: one.first)
    segment = segments[after - 1]
    steps = min(most, segments[after].first - step) if after < len(segments) else most
    start = (step - segment.first) * global_batch_size
    domains, numbers = lay_out(segment.weights, start, start + steps * global_batch_size)
    return domains, numbers + np.array(segment.begins)[domains]


def permute_range(first: int, end: int, size: int, key: int) -> Array:
    """Where the permutation `key` of 0 .. size - 1 puts `first` .. `end` - 1; computed in chunks, which are kept."""
    import numpy as np

    chunks = range(first // _CHUNK, -(-end // _CHUNK))
    found = np.concatenate([_permuted_chunk(chunk, size, key) for chunk in chunks])
    start = chunks.start * _CHUNK
    return found[first - start : end - start].astype(np.int64)


@functools.lru_cache(maxsize=64)
def _permuted_chunk(chunk: int, size: int, key: int) -> Array:
    import numpy as np

    return permute(np.arange(chunk * _CHUNK, min(size, (chunk + 1) * _CHUNK), dtype=np.uint64), size, key)


def permute(places: Array, size: int, key: int) -> Array:
    """A permutation of 0 .. size - 1 that needs no memory: a Feistel network, walked until it is back inside.

    Source: Black and Rogaway 2002, Ciphers with arbitrary finite domains (cycle walking).

    Args:
        places: uint64[n], each below `size`.
        key: another permutation for each.
    """
    bits = max(2, (size - 1).bit_length())
    found = _feistel(places, bits, key)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], bits, key)
    return found


def _feistel(values: Array, bits: int, key: int) -> Array:
    """A bijection of `bits`-bit numbers; the halves may differ by one bit and change their places in every round."""
    import numpy as np

    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = values >> np.uint64(right_bits), values & np.uint64((1 << right_bits) - 1)
    keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(key) + np.uint64(0x9E3779B97F4A7C15))
    for round_key in keys:
        mixed = _mix(right + round_key)
        left, right = right, left ^ (mixed & np.uint64((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _mix(value: Array) -> Array:
    """SplitMix64's finalizer on uint64[n], whose sums and products wrap around."""
    import numpy as np

    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = value ^ (value >> np.uint64(31))
    return mixed
