"""Small corpora for the tests of this folder, and what a prepared one holds."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

from data.inspect import open_pair
from data.manifest import SPLITS
from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.tokenizer import load_tokenizer

VOCAB_SIZE = 320
PROSE = [
    f"The {word} of line {number} isn't in any other; café, naïve, 日本語 and 👩‍👩‍👧 are, it's 3.14!\n\n\tdef f(x):\r\n"
    for number, word in enumerate(["river", "stone", "cloud", "winter", "engine", "garden", "letter", "mirror"] * 30)
]
WORDS = [
    "river",
    "stone",
    "cloud",
    "winter",
    "engine",
    "garden",
    "café",
    "日本語",
    "naïve",
    "mirror",
    "letter",
    "42",
    "isn't",
    "<|endoftext|>",
]
FILES = [f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")]


def make_texts(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + f" {seed}-{number}" for number in range(count)]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in [*FILES, "manifest.json"]}


def documents(folder: Path, split: str) -> list[str]:
    pair, rows, start = open_pair(folder / split), [], 0
    tokenizer = load_tokenizer(folder / "tokenizer")
    for length in pair.lengths.tolist():
        ids = pair.ids[start : start + length].tolist()
        assert ids[-1] == len(tokenizer) - 1 and ids[-1] not in ids[:-1]
        rows.append(ids[:-1])
        start += length
    found: list[str] = tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=False)
    return found


def prepare_and_kill(request: PrepareRequest, target: str, calls: int) -> None:
    """Prepare in a fork that dies by SIGKILL in the given call of the function `target`."""
    module, name = target.rsplit(".", 1)

    def run() -> None:
        owner = importlib.import_module(module)
        real, left = getattr(owner, name), [calls]

        def stop(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, stop)
        prepare_corpus(request)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
