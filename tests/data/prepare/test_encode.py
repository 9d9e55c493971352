"""The same ids from gigatoken as from the HF tokenizer, whatever the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.prepare.encode import Encoder, EncoderSpec, reason_against_gigatoken
from data.tokenizer import backend_json, load_tokenizer, special_tokens
from tests.data.corpora import PROSE, VOCAB_SIZE


@pytest.fixture(scope="session")
def spec(tokenizer_dir: Path) -> EncoderSpec:
    tokenizer = load_tokenizer(tokenizer_dir)
    specials = tuple(special_tokens(tokenizer))
    return EncoderSpec(backend_json(tokenizer), len(tokenizer), specials, "plain", "gigatoken")


def encode(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    ids, lengths = encoder.encode(texts, [text.encode() for text in texts])
    found, start = [], 0
    for length in lengths.tolist():
        found.append(ids[start : start + length].tolist())
        start += length
    assert start == len(ids)
    return found


def needs_gigatoken(spec: EncoderSpec) -> None:
    if reason := reason_against_gigatoken(spec):
        pytest.skip(reason)


ODD = [
    "\u0301",
    "e\u0301",
    "\u07f3\u07fd",
    "\u0f71\u0f72",
    "ᄀ가",
    "Å",
    "\u212b",
    "👩‍👩‍👧",
    "🇩🇪",
    "日本",
    "\u200d",
    "\ufeff",
    "٣",
    "²",
]
TEXTS = st.lists(
    st.one_of(
        st.text(),
        st.text(st.characters(categories=["Mn", "Mc", "Lo", "Nd", "No", "Zs", "Cf"])),
        st.lists(st.sampled_from([*ODD, " ", "\n", "\r\n", "\t", "it's", "a", "7", "<|endoftext|>", "\x00"])).map(
            "".join
        ),
    ),
    min_size=1,
    max_size=6,
)


def test_gigatoken_path_equals_hf_on_any_unicode(spec: EncoderSpec) -> None:
    """Also documents that the sample does not look at: the sample is switched off here."""
    needs_gigatoken(spec)
    fast, slow = Encoder(spec), Encoder(replace(spec, backend="hf"))

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXTS)
    def check(texts: list[str]) -> None:
        assert encode(fast, texts) == encode(slow, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.encode.choose_sample", lambda *_: [])
        check()
    assert fast.counts.batches_redone == 0 < fast.counts.documents_by_hf


def test_special_text_is_plain_by_default_and_a_token_on_request(spec: EncoderSpec) -> None:
    text, eod = "a page on <|endoftext|> markers", VOCAB_SIZE - 1
    transformers_default = Encoder(replace(spec, special_text="control", backend="hf"))
    assert eod in encode(transformers_default, [text])[0]
    for backend in ("hf", "gigatoken"):
        if backend == "gigatoken":
            needs_gigatoken(spec)
        plain = Encoder(replace(spec, backend=backend))
        assert eod not in encode(plain, [text, "nothing here"])[0]
        assert plain.counts.special_text_documents == 1
        control = Encoder(replace(spec, backend=backend, special_text="control"))
        assert encode(control, [text]) == encode(transformers_default, [text])


class Lying:
    """A fast tokenizer that gets one document wrong, or fails outright."""

    def __init__(self, real: Any, wrong: bytes | None) -> None:
        self.real, self.wrong = real, wrong

    def encode_batch(self, raw: list[bytes], parallel: bool) -> Any:
        if self.wrong is None:
            raise RuntimeError("unsupported")
        return self.real.encode_batch([b"other" if text == self.wrong else text for text in raw], parallel=parallel)

    def encode(self, text: str) -> Any:
        return self.real.encode(text)


@pytest.mark.parametrize("wrong", [None, "the longest of all documents, 日本語".encode()])
def test_a_batch_that_differs_from_hf_is_encoded_again(spec: EncoderSpec, wrong: bytes | None) -> None:
    needs_gigatoken(spec)
    texts = [*PROSE[:70], "the longest of all documents, 日本語"]
    encoder = Encoder(spec)
    encoder._gigatoken = Lying(encoder._gigatoken, wrong)
    assert encode(encoder, texts) == encode(Encoder(replace(spec, backend="hf")), texts)
    assert encoder.counts.batches_redone == 1
