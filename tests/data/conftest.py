"""A small tokenizer, and requests to prepare small corpora with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.prepare.request import PrepareRequest
from data.sample import train_tokenizer
from tests.data.corpora import PROSE, VOCAB_SIZE


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-like tokenizer: NFC, Qwen's splitting, byte-level BPE, `<|endoftext|>` as eos and pad."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer({"prose": PROSE}, vocab_size=VOCAB_SIZE).save_pretrained(folder)
    return folder


@pytest.fixture
def ask(tmp_path: Path, tokenizer_dir: Path) -> Callable[..., PrepareRequest]:
    """`ask(input, ...)`: a request with small shards and one worker."""

    def make(*inputs: Path | str, **options: Any) -> PrepareRequest:
        defaults: dict[str, Any] = {"output": tmp_path / "out", "tokenizer": str(tokenizer_dir), "workers": 1}
        defaults |= {"split": "80,10,10", "shard_bytes": 20_000}
        return PrepareRequest(inputs=[str(path) for path in inputs], **{**defaults, **options})

    return make
