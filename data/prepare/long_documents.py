"""Cut long documents at places where no tokenizer of a known kind can notice it.

The HF tokenizer takes about 120 bytes of memory per character of a document: 11.7 GiB for 100 MB. Encoding pieces of it
one after the other takes a few hundred MiB and gives the same ids, if

1. the normaliser changes nothing across the cut: none, or NFC, which composes nothing with a space or a line feed
   before it or with a space after it;
2. the pre-tokeniser always splits there, and gives the same tokens when the text begins or ends there: the regular
   expressions in `_SPLITS`, none of which looks back, split before one space between two ASCII letters, and after one
   line feed that a visible character precedes and that a letter or digit follows;
3. no added token reaches over the cut: none contains whitespace or takes in the whitespace beside it.

Test: tests/data/prepare/test_long_documents.py, with random texts and pieces of a few characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from common.errors import UserError

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLITS = {
    f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}",  # Qwen2 and Qwen2.5
    f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}",  # Llama 3
}
# before a line feed only characters that no library counts as whitespace: ASCII, letters, digits, CJK punctuation
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=[!-~\w\u3001-\u3011\uff01-\uff5e]\n)(?=[^\W_])")


def can_cut(tokenizer_json: str) -> bool:
    """Whether the three conditions hold for a tokenizer, given as the text of its tokenizer.json."""
    tokenizer = json.loads(tokenizer_json)
    normalizer = tokenizer.get("normalizer") or {"type": "NFC"}
    return (
        normalizer["type"] == "NFC"
        and _splits_at_cuts(tokenizer.get("pre_tokenizer"))
        and not any(
            token["lstrip"] or token["rstrip"] or re.search(r"\s", token["content"])
            for token in tokenizer.get("added_tokens") or ()
        )
    )


def cut(text: str, characters: int) -> Iterator[str]:
    """Pieces of `text` of about this many characters, longer where there is no good place; joined they are the text."""
    start = 0
    while len(text) - start > characters:
        place = _CUT.search(text, start + characters)
        if place is None:
            break
        yield text[start : place.start()]
        start = place.start()
    yield text[start:]


def too_long_error(text: str, characters: int) -> UserError:
    """The error for a document with a part that is too long to be encoded at once.

    Args:
        text: the document.
        characters: length of the part.
    """
    return UserError(
        f"a document of {len(text):,} characters is too long for the HF tokenizer",
        expected="a document, or a part of it between two places where every tokenizer splits, of at most 16,777,216 "
        "characters (2 GiB of memory)",
        found=f"{characters:,} characters without such a place, or a tokenizer of another kind than Qwen's; "
        f"the document begins {text[:60]!r}",
        do="divide the document: --txt-unit paragraph or --txt-unit line for .txt files, shorter records for others",
    )


def _splits_at_cuts(pre_tokenizer: Any) -> bool:
    """Whether it is byte-level after one of the known splits, or GPT-2's own."""
    parts = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer]
    byte_level = parts[-1] or {}
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space", True):
        return False
    if len(parts) == 1:
        return bool(byte_level.get("use_regex", True))  # GPT-2's expression
    first = parts[0]
    return bool(
        len(parts) == 2
        and first.get("type") == "Split"
        and first.get("behavior") == "Isolated"
        and not first.get("invert")
        and first.get("pattern", {}).get("Regex") in _SPLITS
        and not byte_level.get("use_regex", True)
    )
