"""Documents that are encoded in pieces have the ids that they have as a whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.prepare import encode as encode_module
from data.prepare.encode import Encoder, EncoderSpec
from data.prepare.long_documents import can_cut, cut
from data.tokenizer import backend_json, load_tokenizer, special_tokens
from tests.data.prepare.test_encode import ODD, encode

PARTS = [
    *ODD,
    "\n\n",
    "\r\n",
    "\t",
    "\u00a0",
    "\u3000",
    "I'LL",
    "'s",
    "7",
    "12",
    "_",
    ".",
    "...",
    "。",
    "<|endoftext|>",
]
PARTS += ["。", "<|endoftext|>", "\x00", "\x1c", "\x85", "\u180e", "\u2028", "\u200b", "\u0323"]
COMMON = [" ", " ", "\n", "a", "b", "it's", "word", " word", "a b", "b\na", "日\n本", "。\n日"]
TEXTS = st.lists(st.one_of(st.sampled_from(COMMON), st.sampled_from(PARTS)), max_size=60).map("".join)
SPLITS: dict[str, Any] = {
    "Qwen": None,
    "Llama 3": "\\p{N}{1,3}",
    "GPT-2": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
}


@pytest.fixture(scope="session")
def spec(tokenizer_dir: Path) -> EncoderSpec:
    tokenizer = load_tokenizer(tokenizer_dir)
    return EncoderSpec(backend_json(tokenizer), len(tokenizer), tuple(special_tokens(tokenizer)), "plain", "hf")


def with_split(spec: EncoderSpec, name: str) -> EncoderSpec:
    content, other = json.loads(spec.tokenizer_json), SPLITS[name]
    if isinstance(other, dict):
        content["pre_tokenizer"] = other
    elif other:
        pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        pattern["Regex"] = pattern["Regex"].replace("|\\p{N}|", f"|{other}|")
    return replace(spec, tokenizer_json=json.dumps(content))


@pytest.mark.parametrize("special_text", ["plain", "control"])
@pytest.mark.parametrize("name", SPLITS)
def test_pieces_have_the_ids_of_the_whole(
    spec: EncoderSpec, monkeypatch: pytest.MonkeyPatch, name: str, special_text: str
) -> None:
    encoder = Encoder(replace(with_split(spec, name), special_text=special_text))
    assert encoder._can_cut
    pieces = 0

    @settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 12))
    def check(texts: list[str], characters: int) -> None:
        nonlocal pieces
        pieces += sum(len(list(cut(text, characters))) - 1 for text in texts)
        monkeypatch.setattr(encode_module, "HF_BATCH_CHARACTERS", 2 * characters)
        whole = [one.ids for one in encoder._hf.encode_batch_fast(texts, add_special_tokens=False)]
        assert encode(encoder, texts) == whole

    check()
    assert pieces > 20


def test_a_long_text_is_cut_and_loses_nothing() -> None:
    text = "one two three\nfour。\n五 six" * 1000
    pieces = list(cut(text, 100))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 150 and len(pieces) > 100


OTHERS: dict[str, tuple[str, Any]] = {
    "another expression": ("pre_tokenizer", {"type": "Whitespace"}),
    "no splitting": ("pre_tokenizer", None),
    "a prefix space": ("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}),
    "another normaliser": ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
    "a token that takes in spaces": (
        "added_tokens",
        [{"id": 1, "content": "x", "lstrip": True, "rstrip": False, "special": True}],
    ),
    "a token with a space": (
        "added_tokens",
        [{"id": 1, "content": "x y", "lstrip": False, "rstrip": False, "special": True}],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not_known_is_not_cut(spec: EncoderSpec, case: str) -> None:
    key, value = OTHERS[case]
    assert can_cut(spec.tokenizer_json)
    assert not can_cut(json.dumps(json.loads(spec.tokenizer_json) | {key: value}))


def test_a_document_that_cannot_be_cut_is_refused_by_its_size(
    spec: EncoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_module, "LONGEST_UNCUT", 100)
    monkeypatch.setattr(encode_module, "HF_BATCH_CHARACTERS", 40)
    encoder = Encoder(spec)
    assert encode(encoder, ["a b " * 100])
    with pytest.raises(UserError, match="too long for the HF tokenizer"):
        encode(encoder, ["x" * 101])
