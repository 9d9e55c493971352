"""Text to ids: gigatoken where it is proven equal on a sample of each batch, else the HF tokenizer.

The HF tokenizer is the reference. gigatoken gives the same ids many times faster. In every batch a sample of
documents is encoded with both, and a single difference sends the whole batch to the HF tokenizer. Documents with
characters on which Unicode versions differ (data/prepare/unicode.py) always get the HF tokenizer's ids.

A special token that is spelled out in a document ("<|endoftext|>" in a web page about models) is by default encoded
as plain text. A transformers tokenizer called with its defaults would turn it into the control token, so that a
document could fake the end of a document. `special_text="control"` asks for that behaviour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common.errors import ProjectError
from data.prepare.long_documents import can_cut, cut, too_long_error
from data.prepare.unicode import has_changed_characters

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ids = npt.NDArray[np.uint32]
    Lengths = npt.NDArray[np.int64]

SAMPLE_DOCUMENTS = 64
SAMPLE_CHARACTERS = 4096
EXTREME_DOCUMENTS = 4  # of each kind: the longest, the least ASCII, those that spell a special token
EXTREME_CHARACTERS = 32768
HF_BATCH_DOCUMENTS = 256
HF_BATCH_CHARACTERS = 1 << 21  # encoded at once; the HF tokenizer takes about 120 bytes of memory per character
LONGEST_UNCUT = 1 << 24  # characters: 2 GiB of memory in the HF tokenizer


@dataclass(frozen=True)
class EncoderSpec:
    """All that a worker needs to build its encoder.

    Args:
        tokenizer_json: text of tokenizer.json.
        vocab_size: every id must be below it.
        special_tokens: texts of the control tokens.
        special_text: "plain" or "control": what such a text inside a document becomes.
        backend: "gigatoken" (checked against HF) or "hf".
    """

    tokenizer_json: str
    vocab_size: int
    special_tokens: tuple[str, ...]
    special_text: str
    backend: str


@dataclass
class EncodeCounts:
    """What an encoder has done.

    Args:
        documents_checked: documents encoded by both tokenizers and compared.
        documents_by_hf: single documents that got the HF tokenizer's ids because of their characters.
        batches: batches encoded in all.
        batches_redone: batches that the HF tokenizer encoded because the sample differed.
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
        self._can_cut = can_cut(self.spec.tokenizer_json)
        self._gigatoken = load_gigatoken(self.spec) if self.spec.backend == "gigatoken" else None
        self._special = re.compile("|".join(map(re.escape, self.spec.special_tokens)) or r"(?!)")

    def encode(self, texts: Sequence[str], raw: Sequence[bytes]) -> tuple[Ids, Lengths]:
        """Encode documents, given as text and as UTF-8 bytes.

        Returns:
            ids: uint32[sum of lengths], without end-of-document ids; lengths: int64[num_documents].

        Raises:
            ProjectError: an id at or above the vocabulary size.
            UserError: a document that is too long for the HF tokenizer and cannot be cut.
        """
        special = [number for number, text in enumerate(texts) if self._special.search(text)]
        self.counts.special_text_documents += len(special)
        self.counts.batches += 1
        result = self._encode_with_gigatoken(texts, raw, special) if self._gigatoken is not None else None
        if result is None:
            self.counts.batches_redone += self._gigatoken is not None
            result = self._encode_with_hf(texts)
        highest = int(result[0].max()) if len(result[0]) else 0
        if highest >= self.spec.vocab_size:
            raise ProjectError(
                "the tokenizer gave an id outside its vocabulary",
                expected=f"ids below {self.spec.vocab_size}",
                found=str(highest),
                do="check tokenizer.json: its added tokens and its vocabulary disagree",
            )
        return result

    def _encode_with_hf(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        import numpy as np

        lengths, parts = np.zeros(len(texts), dtype=np.int64), []
        for batch in self._batch_for_hf(texts):
            pieces = [piece for _, piece in batch]
            for (number, _), encoding in zip(
                batch, self._hf.encode_batch_fast(pieces, add_special_tokens=False), strict=True
            ):
                parts.append(np.array(encoding.ids, dtype=np.uint32))
                lengths[number] += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.uint32), lengths

    def _batch_for_hf(self, texts: Sequence[str]) -> Iterator[list[tuple[int, str]]]:
        """(number of the document, text) in order, in batches of bounded size; long documents are cut in pieces."""
        batch: list[tuple[int, str]] = []
        characters = 0
        for number, text in enumerate(texts):
            for piece in cut(text, HF_BATCH_CHARACTERS // 2) if self._can_cut else [text]:
                if len(piece) > LONGEST_UNCUT:
                    raise too_long_error(text, len(piece))
                if batch and (len(batch) >= HF_BATCH_DOCUMENTS or characters + len(piece) > HF_BATCH_CHARACTERS):
                    yield batch
                    batch, characters = [], 0
                batch.append((number, piece))
                characters += len(piece)
        if batch:
            yield batch

    def _encode_with_gigatoken(
        self, texts: Sequence[str], raw: Sequence[bytes], special: Sequence[int]
    ) -> tuple[Ids, Lengths] | None:
        """The ids by gigatoken, or None when it failed or differs from the HF tokenizer on the sample."""
        import numpy as np

        assert self._gigatoken is not None
        try:
            layout = self._gigatoken.encode_batch(list(raw), parallel=False).layout
            offsets, ids = np.asarray(layout.offsets.data), np.asarray(layout.content.data)
            if not self._sample_agrees(texts, raw, special, ids, offsets):
                return None
            return self._replace_changed_documents(texts, ids, offsets)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # the HF tokenizer encodes what gigatoken cannot; a Rust panic is no Exception
            return None

    def _replace_changed_documents(self, texts: Sequence[str], ids: Ids, offsets: Any) -> tuple[Ids, Lengths]:
        """Put the HF tokenizer's ids in the place of documents with characters that Unicode versions differ on."""
        import numpy as np

        changed = [number for number, text in enumerate(texts) if has_changed_characters(text)]
        lengths, start, parts = np.diff(offsets), offsets[0], []
        reference, reference_lengths = self._encode_with_hf([texts[number] for number in changed])
        self.counts.documents_by_hf += len(changed)
        for number, part in zip(changed, np.split(reference, np.cumsum(reference_lengths)[:-1]), strict=False):
            parts += [ids[start : offsets[number]], part]
            start, lengths[number] = offsets[number + 1], len(part)
        return np.concatenate([*parts, ids[start : offsets[-1]]]).astype(np.uint32, copy=False), lengths

    def _sample_agrees(
        self, texts: Sequence[str], raw: Sequence[bytes], special: Sequence[int], ids: Ids, offsets: Any
    ) -> bool:
        assert self._gigatoken is not None
        sample = [
            (number, limit)
            for number, limit in choose_sample(texts, raw, special)
            if not has_changed_characters(texts[number])
        ]
        starts = [texts[number][:limit] for number, limit in sample]
        reference = [encoding.ids for encoding in self._hf.encode_batch_fast(starts, add_special_tokens=False)]
        self.counts.documents_checked += len(sample)
        for (number, limit), start, expected in zip(sample, starts, reference, strict=True):
            whole = len(texts[number]) <= limit
            got = ids[offsets[number] : offsets[number + 1]] if whole else self._gigatoken.encode(start)
            if got.tolist() != expected:
                return False
        return True


def choose_sample(texts: Sequence[str], raw: Sequence[bytes], special: Sequence[int]) -> list[tuple[int, int]]:
    """Choose the documents to compare, as (number, most characters to compare); the same for the same batch.

    Evenly spaced ones, the longest, those with most non-ASCII bytes, and some that spell a special token.
    """
    count = len(texts)
    step = max(1, count // SAMPLE_DOCUMENTS)
    sample = dict.fromkeys(range(0, count, step), SAMPLE_CHARACTERS)
    by_length = sorted(range(count), key=lambda number: -len(texts[number]))
    by_extra_bytes = sorted(range(count), key=lambda number: len(texts[number]) - len(raw[number]))
    for group in (by_length, by_extra_bytes, special):
        sample.update(dict.fromkeys(group[:EXTREME_DOCUMENTS], EXTREME_CHARACTERS))
    return sorted(sample.items())


def load_hf(spec: EncoderSpec) -> Any:
    """Load the reference, a `tokenizers.Tokenizer`, with padding and truncation off."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(spec.tokenizer_json)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = spec.special_text == "plain"
    return tokenizer


def load_gigatoken(spec: EncoderSpec) -> Any:
    """Load the fast tokenizer; raises whatever gigatoken raises on a tokenizer that it does not support."""
    import gigatoken

    behaviour = json.loads(spec.tokenizer_json)
    behaviour["padding"] = behaviour["truncation"] = None
    if spec.special_text == "plain":
        behaviour["added_tokens"] = [token for token in behaviour["added_tokens"] if not token["special"]]
    return gigatoken.Tokenizer.from_json(json.dumps(behaviour))


def reason_against_gigatoken(spec: EncoderSpec) -> str:
    """Why gigatoken cannot encode for this tokenizer, in one line; empty when it can."""
    try:
        load_gigatoken(spec).encode("a b")
    except ImportError:
        return "gigatoken is not installed (pip install 'gigatoken==0.10.0')"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # its errors have no common base, and a Rust panic is no Exception
        return f"gigatoken does not support this tokenizer: {str(error)[:120]}"
    return ""
