"""An existing Megatron .bin/.idx (of Megatron-LM, NeMo Curator, datatrove) as a corpus with a manifest.

Nothing large is copied. `train.bin` is a hard link to the .bin (a symbolic link on another file system), and
`train.idx` is a new index of it that leaves some documents out: those are copied, at most `MOST_HELD_OUT` tokens each,
into `validation` and `test`. The last document stays in train, so that the index still says how long the .bin is.

Before that all ids, lengths, offsets and the ends of all documents are read once, memory-mapped and in blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.files import file_sha256
from data.block_hashes import hash_blocks
from data.indexed import HEADER, IndexFacts, check_prefix, read_index
from data.manifest import FILE_NAME, PARTIAL_NAME, EncodingFacts, Manifest, SourceFacts, SplitFacts, TokenizerFacts
from data.prepare import publish
from data.prepare.merge import write_idx
from data.prepare.prepare import tokenizer_facts
from data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

HELD_OUT_SHARE = 0.01  # of the tokens, for validation and for test each
MOST_HELD_OUT = 10_000_000  # tokens
BLOCK = 1 << 24  # ids or documents read at once
SAMPLED_DOCUMENTS, SAMPLED_TOKENS = 32, 256
ID_TYPES = ("uint16", "int32")
log = logging.getLogger("launch")


@dataclass(frozen=True)
class Pair:
    """A memory-mapped pair: ids[num_tokens], lengths int32[n] in tokens, starts int64[n] in ids."""

    prefix: Path
    facts: IndexFacts
    ids: Any
    lengths: Any
    starts: Any


def adopt_corpus(prefix: str, tokenizer_name: str, output: Path, seed: int = 1234) -> Manifest:
    """Make a corpus in `output` of the pair `prefix`.bin and `prefix`.idx.

    Raises:
        UserError: wrong tokenizer, ids or document ends, or something is in `output` already.
        PreflightError: a damaged pair, or an .idx that belongs to another .bin.
    """
    path, output = Path(prefix).expanduser().absolute(), Path(output).expanduser().absolute()
    pair = open_checked(path)
    tokenizer = load_tokenizer(tokenizer_name)
    facts = tokenizer_facts(tokenizer_name, tokenizer)
    _check_output(output)
    _check_ends(pair, tokenizer, facts)
    _check_ids(pair, facts)
    _check_round_trip(pair, tokenizer, facts)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with publish.lock_output(output):
            return _write(pair, tokenizer, facts, output, seed)
    except OSError as error:
        raise publish.explain_os_error(error, output, []) from error


def open_checked(prefix: Path) -> Pair:
    """Map a pair after the checks of its sizes, of the type of its ids, and of all lengths and offsets.

    Raises:
        UserError, PreflightError: the first problem.
    """
    import numpy as np

    for problem in check_prefix(prefix):
        raise problem
    facts = read_index(prefix)
    if facts.dtype not in ID_TYPES:
        raise UserError(
            f"{prefix}.bin holds ids of type {facts.dtype}",
            expected=" or ".join(ID_TYPES) + ", as Megatron writes token ids",
            found=facts.dtype,
            do="give the .bin of token ids",
        )
    count, offset = facts.num_sequences, HEADER.size
    lengths = np.memmap(f"{prefix}.idx", "<i4", "r", offset, (count,))
    pointers = np.memmap(f"{prefix}.idx", "<i8", "r", offset + 4 * count, (count,))
    documents = np.memmap(f"{prefix}.idx", "<i8", "r", offset + 12 * count, (facts.num_documents + 1,))
    if int(documents[0]) != 0 or int(documents[-1]) != count or facts.num_documents != count:
        raise _index_error(
            prefix,
            "one sequence per document",
            f"{count:,} sequences in {facts.num_documents:,} documents",
            "tokenise again without --split-sentences",
        )
    end = 0
    for start in range(0, count, BLOCK):
        part = lengths[start : start + BLOCK].astype(np.int64)
        ends = end + np.cumsum(part) * facts.itemsize
        if part.min() < 1 or not np.array_equal(pointers[start : start + BLOCK], ends - part * facts.itemsize):
            row = start + int(np.argmax((part < 1) | (pointers[start : start + BLOCK] != ends - part * facts.itemsize)))
            raise _index_error(
                prefix, "documents of one or more ids, one after the other", f"document {row:,} is not", "copy it again"
            )
        end = int(ends[-1])
    ids = np.memmap(f"{prefix}.bin", facts.dtype, "r")
    return Pair(prefix, facts, ids, lengths, pointers)


def _index_error(prefix: Path, expected: str, found: str, do: str) -> UserError:
    return UserError(f"{prefix}.idx cannot be adopted", expected=expected, found=found, do=do)


def _check_output(output: Path) -> None:
    if any((output / name).exists() for name in (FILE_NAME, "train.bin", f"{PARTIAL_NAME}/request.json")):
        raise UserError(
            f"{output} holds a corpus already",
            expected="a folder that does not exist yet",
            found=", ".join(sorted(path.name for path in output.iterdir())[:5]),
            do="another --output",
        )


def _check_ends(pair: Pair, tokenizer: PreTrainedTokenizerFast, facts: TokenizerFacts) -> None:
    """Every document ends with the end-of-document id; without it documents run into each other."""
    import numpy as np

    without, first, last_ids = 0, -1, np.zeros(0, dtype=np.int64)
    for start in range(0, len(pair.lengths), BLOCK):
        part = slice(start, start + BLOCK)
        last = pair.ids[pair.starts[part] // pair.facts.itemsize + pair.lengths[part] - 1]
        wrong = np.flatnonzero(last != facts.eod_id)
        if len(wrong) and first < 0:
            first, last_ids = start + int(wrong[0]), last[wrong][:1000]
        without += len(wrong)
    if not without:
        return
    common = int(np.bincount(last_ids.astype(np.int64)).argmax())
    raise UserError(
        f"{pair.prefix}: {without:,} of {len(pair.lengths):,} documents do not end with the end-of-document token",
        expected=f"{facts.eod_token} = {facts.eod_id} of {facts.source} at the end of each document",
        found=f"document {first:,} ends with id {int(last_ids[0])}; most frequent among them: {common}",
        do="name the tokenizer that made the ids with --tokenizer"
        if without == len(pair.lengths)
        else "tokenise again with an end-of-document token (Megatron-LM: --append-eod)",
    )


def _check_ids(pair: Pair, facts: TokenizerFacts) -> None:
    for start in range(0, len(pair.ids), BLOCK):
        block = pair.ids[start : start + BLOCK]
        low, high = int(block.min()), int(block.max())
        if low < 0 or high >= facts.vocab_size:
            wrong = low if low < 0 else high
            place = start + int((block == wrong).argmax())
            raise UserError(
                f"{pair.prefix}.bin holds an id that the tokenizer does not have",
                expected=f"0 to {facts.vocab_size - 1:,} ({facts.source})",
                found=f"{wrong:,} at id {place:,} of the file",
                do="name the tokenizer that made the ids with --tokenizer",
            )


def _check_round_trip(pair: Pair, tokenizer: PreTrainedTokenizerFast, facts: TokenizerFacts) -> None:
    """Another tokenizer may have as many ids and the same end-of-document id; its ids decode to text that encodes
    differently. A text can be encoded in other ways than the usual one, so that a few may differ."""
    import numpy as np

    tried = agree = 0
    example = ""
    for number in np.linspace(0, len(pair.lengths) - 1, min(SAMPLED_DOCUMENTS, len(pair.lengths)), dtype=int):
        start = int(pair.starts[number]) // pair.facts.itemsize
        ids = pair.ids[start : start + int(pair.lengths[number]) - 1].tolist()
        whole, ids = len(ids) <= SAMPLED_TOKENS, ids[:SAMPLED_TOKENS]
        if not ids or facts.eod_id in ids:
            continue
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        again = tokenizer.encode(text, add_special_tokens=False)
        kept = len(ids) if whole else max(1, len(ids) - 8)  # the last ids of a cut text may be joined differently
        tried += 1
        if again[:kept] == ids[:kept]:
            agree += 1
        example = example or text[:60]
    if tried and agree < tried / 2:
        raise UserError(
            f"{pair.prefix}: the ids are not those of this tokenizer",
            expected=f"documents that {facts.source} decodes and encodes to the same ids",
            found=f"{agree} of {tried} sampled documents; one is decoded as {example!r}",
            do="name the tokenizer that made the ids with --tokenizer",
        )


def _write(pair: Pair, tokenizer: PreTrainedTokenizerFast, facts: TokenizerFacts, output: Path, seed: int) -> Manifest:
    """The files of the corpus, in a hidden folder first, the manifest last of all."""
    import numpy as np

    held_out = _choose(pair, seed)
    partial = output / PARTIAL_NAME
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "out").mkdir(parents=True)
    link = _link(Path(f"{pair.prefix}.bin"), partial / "out" / "train.bin")
    mask = np.ones(len(pair.lengths), dtype=bool)
    mask[np.concatenate(held_out)] = False
    write_idx(partial / "out" / "train.idx", pair.lengths[mask], pair.starts[mask], pair.facts.dtype)
    sizes = _bytes_of_ids(tokenizer, facts)
    splits = {"train": _facts(partial / "out" / "train", pair, np.flatnonzero(mask), sizes)}
    for name, rows in zip(("validation", "test"), held_out, strict=True):
        _copy(pair, rows, partial / "out" / name)
        splits[name] = _facts(partial / "out" / name, pair, rows, sizes)
    tokenizer.save_pretrained(partial / "out" / "tokenizer")
    manifest = _manifest(pair, facts, output, seed, splits)
    manifest.save(partial / "out")
    found = publish.publish(partial, output)
    for name, split in splits.items():
        how = f"train.bin is a {link} to {pair.prefix}.bin" if name == "train" else "copied"
        log.info("%10s: %12s documents %15s tokens  (%s)", name, f"{split.documents:,}", f"{split.tokens:,}", how)
    return found


def _choose(pair: Pair, seed: int) -> tuple[Any, Any]:
    """Documents for validation and test, drawn by the seed: int64[n] each, ascending, without the last document."""
    import numpy as np

    count = len(pair.lengths)
    if count < 3:
        raise UserError(
            f"{pair.prefix} has too few documents",
            expected="three or more: to train, to validate and to test",
            found=f"{count}",
            do="adopt a larger file",
        )
    target = min(MOST_HELD_OUT, HELD_OUT_SHARE * len(pair.ids))
    wanted = min(count - 1, 4 * max(1, int(target * count / len(pair.ids)) + 1))
    rows = np.random.default_rng(seed).choice(count - 1, size=max(2, wanted), replace=False)
    ends = np.cumsum(pair.lengths[rows], dtype=np.int64)
    first = min(max(1, int(np.searchsorted(ends, target)) + 1), len(rows) - 1)
    second = min(max(first + 1, int(np.searchsorted(ends, ends[first - 1] + target)) + 1), len(rows))
    return np.sort(rows[:first]), np.sort(rows[first:second])


def _link(source: Path, target: Path) -> str:
    """Make `target` the same file as `source`; returns what kind of link it is."""
    with contextlib.suppress(OSError):
        os.link(source.resolve(), target)
        return "hard link"
    target.symlink_to(source.resolve())
    return "symbolic link"


def _copy(pair: Pair, rows: Any, target: Path) -> None:
    import numpy as np

    with Path(f"{target}.bin").open("wb") as file:
        for row in rows.tolist():
            start = int(pair.starts[row]) // pair.facts.itemsize
            file.write(pair.ids[start : start + int(pair.lengths[row])].tobytes())
    lengths = np.asarray(pair.lengths[rows])
    ends = np.cumsum(lengths, dtype=np.int64) * pair.facts.itemsize
    write_idx(Path(f"{target}.idx"), lengths, ends - lengths * np.int64(pair.facts.itemsize), pair.facts.dtype)


def _bytes_of_ids(tokenizer: PreTrainedTokenizerFast, facts: TokenizerFacts) -> Any:
    """int64[vocab_size]: UTF-8 bytes of text that each id stands for; 0 for the end of a document."""
    import numpy as np

    sizes, added = np.zeros(facts.vocab_size, dtype=np.int64), tokenizer.added_tokens_decoder
    byte_level = type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"
    for token, number in tokenizer.get_vocab().items():
        if number in added or not byte_level:
            sizes[number] = len(tokenizer.convert_tokens_to_string([token]).encode())
        else:
            sizes[number] = len(token)  # one character of a byte-level token is one byte
    sizes[facts.eod_id] = 0
    return sizes


def _runs(rows: Any) -> Iterator[tuple[int, int]]:
    """First and last of each run of adjacent numbers in ascending `rows`."""
    import numpy as np

    cuts = np.flatnonzero(np.diff(rows) != 1)
    firsts, lasts = np.concatenate(([0], cuts + 1)), np.concatenate((cuts, [len(rows) - 1]))
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        yield int(rows[first]), int(rows[last])


def _facts(prefix: Path, pair: Pair, rows: Any, sizes: Any) -> SplitFacts:
    """Of a written split; `rows` are its documents in the pair."""
    import numpy as np

    text_bytes = 0
    for first, last in _runs(rows):
        begin = int(pair.starts[first]) // pair.facts.itemsize
        end = int(pair.starts[last]) // pair.facts.itemsize + int(pair.lengths[last])
        for start in range(begin, end, BLOCK):
            text_bytes += int(sizes[pair.ids[start : min(end, start + BLOCK)]].sum())
    bin_path, idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    return SplitFacts(
        documents=len(rows),
        tokens=int(pair.lengths[rows].sum(dtype=np.int64)),
        text_bytes=text_bytes,
        duplicates_dropped=0,
        bin_sha256=file_sha256(bin_path),
        idx_sha256=file_sha256(idx_path),
        bin_blocks=hash_blocks(bin_path),
    )


def _manifest(pair: Pair, facts: TokenizerFacts, output: Path, seed: int, splits: dict[str, SplitFacts]) -> Manifest:
    total = sum(split.tokens for split in splits.values())
    bin_path = Path(f"{pair.prefix}.bin")
    return Manifest(
        name=output.name,
        created_by=publish.library_versions(),
        settings={"adopted": str(pair.prefix), "seed": seed, "special_text": "as it was"},
        seed=seed,
        shares={name: split.tokens / total for name, split in splits.items()},
        text_field="",
        dedup="off",
        dtype=pair.facts.dtype,
        lines_skipped=0,
        empty_documents=0,
        special_text_documents=0,
        encoding=EncodingFacts("adopted", documents_checked=0, documents_by_hf=0, batches=0, batches_redone=0),
        tokenizer=facts,
        splits=splits,
        sources=[SourceFacts(str(bin_path), bin_path.stat().st_size, splits["train"].bin_sha256)],
    )
