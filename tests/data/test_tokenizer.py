"""Tokenizers: their fingerprint, the end-of-document id, and those that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UserError
from data.tokenizer import eod_id, fingerprint, load_tokenizer
from tests.data.corpora import VOCAB_SIZE


def test_fingerprint_knows_a_copy_and_sees_a_change(tokenizer_dir: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    before = fingerprint(tokenizer)
    tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.padding is not None
    tokenizer.save_pretrained(tmp_path / "copy")
    assert fingerprint(tokenizer) == fingerprint(load_tokenizer(tmp_path / "copy")) == before
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert fingerprint(tokenizer) != before


def test_end_of_document_is_endoftext_then_eos_then_an_error(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    assert eod_id(tokenizer) == VOCAB_SIZE - 1 != tokenizer.eos_token_id
    from transformers import PreTrainedTokenizerFast

    from data.sample import byte_level_bpe

    with pytest.raises(UserError, match="no token that ends a document"):
        eod_id(PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe()))


def test_slow_only_and_unknown_tokenizers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UserError, match="only a slow tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="huggingface-cli download nobody/nothing"):
        load_tokenizer("nobody/nothing")
