"""Text to ids: gigatoken where it is proven equal on a sample of each batch, else the HF tokenizer.

The HF tokenizer is the truth. gigatoken gives the same ids many times faster; for every batch, a sample of
documents is encoded with both, and one difference sends the whole batch to the HF tokenizer. Documents with
characters on which Unicode versions differ (data/prepare/unicode.py) always get the HF tokenizer's ids.

A special token spelled out in a document ("<|endoftext|>" in a web page about models) is by default encoded
as the plain text it is. A transformers tokenizer called with its defaults would turn it into the control
token, so that a document could fake a border. `special_text="control"` asks for that behaviour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import ProjectError
from data.prepare.unicode import has_changed_characters

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.uint32]
    Lengths = npt.NDArray[np.int64]

SAMPLE_DOCUMENTS = 64
SAMPLE_EXTREMES = 4
SAMPLE_CHARACTERS = 4096
EXTREME_CHARACTERS = 32768
HF_BATCH = 256


@dataclass(frozen=True)
class EncoderSpec:
    """All that a worker needs to build its encoder.

    Args:
        tokenizer_json: text of tokenizer.json.
        vocab_size: every id must be below it.
        special_tokens: texts of the control tokens.
        special_text: "plain" or "control": what such a text inside a document becomes.
        fast: "gigatoken" or "hf".
    """

    tokenizer_json: str
    vocab_size: int
    special_tokens: tuple[str, ...]
    special_text: str
    fast: str


@dataclass
class EncodeCounts:
    """What happened so far.

    Args:
        documents_checked: documents encoded by both tokenizers and compared.
        documents_by_hf: single documents that got the oracle's ids because of their characters.
        batches: batches encoded in all.
        batches_redone: batches that went to the oracle because the sample differed.
        special_text_documents: documents that spell a special token.
    """

    documents_checked: int = 0
    documents_by_hf: int = 0
    batches: int = 0
    batches_redone: int = 0
    special_text_documents: int = 0


@dataclass
class Encoder:
    """Encodes batches of documents in this process, on one core."""

    spec: EncoderSpec
    counts: EncodeCounts = field(default_factory=EncodeCounts)

    def __post_init__(self) -> None:
        self._hf = load_hf(self.spec)
        self._giga = load_gigatoken(self.spec) if self.spec.fast == "gigatoken" else None
        self._special = re.compile("|".join(map(re.escape, self.spec.special_tokens)) or r"(?!)")

    def encode(self, texts: Sequence[str], raw: Sequence[bytes]) -> tuple[Ids, Lengths]:
        """Encode documents, given as text and as UTF-8 bytes.

        Returns:
            ids: uint32[sum of lengths], no EOD yet; lengths: int64[num_documents].

        Raises:
            ProjectError: an id at or above the vocabulary size.
        """
        special = [number for number, text in enumerate(texts) if self._special.search(text)]
        self.counts.special_text_documents += len(special)
        self.counts.batches += 1
        result = self._fast(texts, raw, special) if self._giga is not None else None
        if result is None:
            self.counts.batches_redone += self._giga is not None
            result = self._slow(texts)
        highest = int(result[0].max()) if len(result[0]) else 0
        if highest >= self.spec.vocab_size:
            raise ProjectError(
                "the tokenizer gave an id outside its vocabulary",
                expected=f"ids below {self.spec.vocab_size}",
                found=str(highest),
                do="check tokenizer.json: its added tokens and its vocabulary disagree",
            )
        return result

    def _slow(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        import numpy as np

        parts = [
            np.array(encoding.ids, dtype=np.uint32)
            for start in range(0, len(texts), HF_BATCH)
            for encoding in self._hf.encode_batch_fast(list(texts[start : start + HF_BATCH]), add_special_tokens=False)
        ]
        lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        return np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths

    def _fast(self, texts: Sequence[str], raw: Sequence[bytes], special: Sequence[int]) -> tuple[Ids, Lengths] | None:
        """The ids by gigatoken, or None when it failed or the oracle disagrees."""
        import numpy as np

        assert self._giga is not None
        try:
            layout = self._giga.encode_batch(list(raw), parallel=False).layout
            offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
            if not self._agrees(texts, raw, special, ids, offsets):
                return None
            return self._mend(texts, ids, offsets)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # whatever the fast path cannot do, the oracle does; a Rust panic is no Exception
            return None

    def _mend(self, texts: Sequence[str], ids: Ids, offsets: Any) -> tuple[Ids, Lengths]:
        """Put the oracle's ids in the place of documents with characters that Unicode versions differ on."""
        import numpy as np

        rare = [number for number, text in enumerate(texts) if has_changed_characters(text)]
        lengths, start, parts = np.diff(offsets), offsets[0], []
        truth, truth_lengths = self._slow([texts[number] for number in rare])
        self.counts.documents_by_hf += len(rare)
        for number, part in zip(rare, np.split(truth, np.cumsum(truth_lengths)[:-1]), strict=False):
            parts += [ids[start : offsets[number]], part]
            start, lengths[number] = offsets[number + 1], len(part)
        return np.concatenate([*parts, ids[start : offsets[-1]]]).astype(np.uint32, copy=False), lengths

    def _agrees(
        self, texts: Sequence[str], raw: Sequence[bytes], special: Sequence[int], ids: Ids, offsets: Any
    ) -> bool:
        assert self._giga is not None
        sample = [
            (number, limit)
            for number, limit in choose_sample(texts, raw, special)
            if not has_changed_characters(texts[number])
        ]
        cuts = [texts[number][:limit] for number, limit in sample]
        truth = [encoding.ids for encoding in self._hf.encode_batch_fast(cuts, add_special_tokens=False)]
        self.counts.documents_checked += len(sample)
        for (number, limit), cut, expected in zip(sample, cuts, truth, strict=True):
            whole = len(texts[number]) <= limit
            got = ids[offsets[number] : offsets[number + 1]] if whole else self._giga.encode(cut)
            if got.tolist() != expected:
                return False
        return True


def choose_sample(texts: Sequence[str], raw: Sequence[bytes], special: Sequence[int]) -> list[tuple[int, int]]:
    """Documents for the oracle, as (number, most characters to compare), the same for the same batch.

    Evenly spaced ones, the longest, those with most non-ASCII bytes, and some that spell a special token.
    """
    count = len(texts)
    step = max(1, count // SAMPLE_DOCUMENTS)
    chosen = dict.fromkeys(range(0, count, step), SAMPLE_CHARACTERS)
    by_length = sorted(range(count), key=lambda number: -len(texts[number]))
    by_wideness = sorted(range(count), key=lambda number: len(texts[number]) - len(raw[number]))
    for group in (by_length, by_wideness, special):
        chosen.update(dict.fromkeys(group[:SAMPLE_EXTREMES], EXTREME_CHARACTERS))
    return sorted(chosen.items())


def load_hf(spec: EncoderSpec) -> Any:
    """The oracle: `tokenizers.Tokenizer` with padding and truncation off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = spec.special_text == "plain"
    return tokenizer


def load_gigatoken(spec: EncoderSpec) -> Any:
    """The fast tokenizer; raises whatever gigatoken raises on a tokenizer it does not know."""
    import gigatoken

    behaviour = json.loads(spec.tokenizer_json)
    behaviour["padding"] = behaviour["truncation"] = None
    if spec.special_text == "plain":
        behaviour["added_tokens"] = [token for token in behaviour["added_tokens"] if not token["special"]]
    return gigatoken.Tokenizer.from_json(json.dumps(behaviour))


def why_not_gigatoken(spec: EncoderSpec) -> str:
    """Empty when gigatoken can serve this tokenizer, else the reason in one line."""
    try:
        load_gigatoken(spec).encode("a b")
    except ImportError:
        return "gigatoken is not installed (pip install gigatoken)"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its errors have no common base, and a Rust panic is no Exception
        return f"gigatoken does not support this tokenizer: {str(error)[:120]}"
    return ""
