"""Validation and test documents of a corpus with so few documents that the hash of each leaves a split (nearly) empty.

A document's split follows from its hash, so that it stays the same when data is added. With a hundred documents and a
share of 1% that gives one document, or none. Such a split gets training documents until it holds its share of the
tokens, at least one; which ones depends on the documents only, so that the same files give the same corpus.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from common.files import write_atomic
from data.manifest import SPLITS
from data.prepare.merge import read_docs

MOST_DOCUMENTS = 10_000  # above it a share of 1% is a hundred documents, which the hash finds
ENOUGH = 0.5  # of its share of the tokens: a split that has it stays as the hash made it
Moves = dict[int, int]  # first 64 bits of a document's hash -> number of its split in SPLITS
_FILE = "moves.json"
log = logging.getLogger("launch")


def load_moves(partial: Path) -> Moves | None:
    """The moves that this preparation has decided on; None before that."""
    path = partial / _FILE
    return {int(key): split for key, split in json.loads(path.read_text()).items()} if path.is_file() else None


def save_moves(partial: Path, moves: Moves) -> None:
    """Keep the moves for the second encoding, also if it is interrupted, and drop the shards of the first."""
    write_atomic(partial / _FILE, json.dumps(moves))
    for path in (partial / "shards").iterdir():
        path.unlink()


def choose_moves(work: Path, num_shards: int, shares: tuple[float, ...]) -> Moves:
    """Choose training documents for splits that hold less than `ENOUGH` of their share; log each choice.

    Args:
        work: folder of the finished shard files.

    Returns:
        no moves if the splits are as they should be, if there are many documents, or fewer than three.
    """
    tokens: dict[int, int] = {}
    split_of: Moves = {}
    for number, split in enumerate(SPLITS):
        for docs in (read_docs(work, index, split) for index in range(num_shards)):
            for key, count in zip(docs["high"].tolist(), docs["tokens"].tolist(), strict=True):
                tokens[key] = tokens.get(key, 0) + count  # documents with the same text go together
                split_of[key] = number
        if len(tokens) > MOST_DOCUMENTS:
            return {}
    if len(tokens) < len(SPLITS):
        return {}
    wanted = dict(split_of)
    if 0 not in wanted.values():
        wanted = dict.fromkeys(wanted, 0)
    for number in range(1, len(SPLITS)):
        _fill(number, shares[number] * sum(tokens.values()), tokens, wanted)
    return {key: number for key, number in wanted.items() if number != split_of[key]}


def _fill(number: int, target: float, tokens: Mapping[int, int], split_of: Moves) -> None:
    """Give a split training documents, in the order of their hashes, until it holds `target` tokens."""
    own = [key for key, split in split_of.items() if split == number]
    have = sum(tokens[key] for key in own)
    if own and have >= ENOUGH * target:
        return
    train = sorted(key for key, split in split_of.items() if split == 0)
    smallest = min(tokens[key] for key in train)
    small_enough = [key for key in train if tokens[key] <= max(smallest, 2 * target - have)]
    moved = 0
    for key in small_enough[: len(train) - (len(SPLITS) - number)]:  # one stays in train, one for each later split
        split_of[key] = number
        have, moved = have + tokens[key], moved + 1
        if have >= target:
            break
    log.info(
        "%s: %d document(s) from train, because few documents left it less than its share: %s tokens, %.1f%% of all",
        *(SPLITS[number], moved, f"{have:,}", 100 * have / sum(tokens.values())),
    )
