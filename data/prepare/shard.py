"""One shard of work: read documents, choose their split, encode, append the end-of-document id, write shard files.

Shard 7 gives, for each split, `000007.train.bin` (ids with the end-of-document ids, in the final dtype) and
`000007.train.docs` (one record per document), and last of all its report `000007.json`, whose presence means that the
shard is done. A killed worker leaves `.tmp` files, which the next run overwrites.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from data.manifest import SPLITS
from data.prepare.chat import ChatTemplate
from data.prepare.encode import EncodeCounts, Encoder, EncoderSpec
from data.prepare.input_files import Shard, Source
from data.prepare.readers import read_piece
from data.prepare.record_errors import BadRecordError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# of a .docs file; tokens with the end-of-document id, UTF-8 bytes of the text, and its 128-bit hash
DOC_RECORD = [("tokens", "<i4"), ("bytes", "<i8"), ("high", "<u8"), ("low", "<u8")]
BATCH_CHARACTERS = 1 << 24  # encoded at once
COMPRESSION_GUESS = 3  # text bytes per byte of a compressed file, for the progress bar


@dataclass(frozen=True)
class ShardSpec:
    """All that a worker needs beside the shard itself.

    Args:
        work: folder of the shard files.
        encoder: how to encode.
        dtype: type of the ids in the .bin files, "uint16" or "int32".
        eod_id: the end-of-document id, appended to each document.
        seed: key of the split hash.
        shares: share of each split, in the order of `SPLITS`.
        field, txt_unit, on_error: as in `PrepareRequest`.
        chat: renders the messages in `field`; None where it holds text.
        moves: first 64 bits of a document's hash -> number of its split, for documents whose hash says another one.
    """

    work: Path
    encoder: EncoderSpec
    dtype: str
    eod_id: int
    seed: int
    shares: tuple[float, ...]
    field: str
    txt_unit: str
    on_error: str
    chat: ChatTemplate | None = None
    moves: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclass
class ShardReport:
    """Counts of one shard, `documents` by split; kept as its JSON file."""

    documents: dict[str, int]
    lines_skipped: int
    empty_documents: int
    encoding: EncodeCounts

    @staticmethod
    def load(path: Path) -> ShardReport:
        """Read a finished shard's report."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return ShardReport(**{**raw, "encoding": EncodeCounts(**raw["encoding"])})


def report_path(work: Path, index: int) -> Path:
    """Path of a shard's report; where it exists, the shard is done."""
    return work / f"{index:06d}.json"


def shard_path(work: Path, index: int, split: str, kind: str) -> Path:
    """Path of a shard file; kind is "bin" or "docs"."""
    return work / f"{index:06d}.{split}.{kind}"


def run_shard(index: int, shard: Shard, spec: ShardSpec, encoder: Encoder, advance: Callable[[int], None]) -> None:
    """Encode one shard and write its files; `advance` is called with the input bytes done since its last call.

    Raises:
        UserError: a file or, under `on_error="stop"`, a record that cannot be used.
        OSError: the disk is full, a file cannot be read.
    """
    encoder.counts = EncodeCounts()
    report = ShardReport(dict.fromkeys(SPLITS, 0), 0, 0, encoder.counts)
    left = sum(piece.bytes for piece in shard)
    kinds = [(split, kind) for split in SPLITS for kind in ("bin", "docs")]
    with ExitStack() as stack:
        files = {key: stack.enter_context(_temporary(shard_path(spec.work, index, *key)).open("wb")) for key in kinds}
        for source, texts in _batches(shard, spec, report):
            size = _write_batch(texts, spec, encoder, files, report)
            done = min(left, size // (COMPRESSION_GUESS if source.compression else 1))
            left -= done
            advance(done)
    for key in kinds:
        path = shard_path(spec.work, index, *key)
        _temporary(path).replace(path)
    part = _temporary(report_path(spec.work, index))
    part.write_text(json.dumps(dataclasses.asdict(report)), encoding="utf-8")
    part.replace(report_path(spec.work, index))
    advance(left)


def choose_split(digests: npt.NDArray[np.uint64], shares: tuple[float, ...]) -> npt.NDArray[np.int64]:
    """Choose the split number of each document by the first 64 bits of its hash: uint64[n] -> int64[n].

    It depends on the text and the seed only, so a document keeps its split when data is added.
    """
    import numpy as np

    total = sum(shares)
    bounds = [min(int(sum(shares[: number + 1]) / total * 2**64), 2**64 - 1) for number in range(len(shares) - 1)]
    return np.searchsorted(np.array(bounds, dtype=np.uint64), digests, side="right").astype(np.int64)


def append_eod(ids: Any, lengths: Any, eod_id: int, dtype: str) -> Any:
    """Insert the end-of-document id after each document: ids[n], lengths int64[d] -> dtype[n + d]."""
    import numpy as np

    ends = np.cumsum(lengths + 1) - 1
    body = np.ones(len(ids) + len(lengths), dtype=bool)
    body[ends] = False
    out = np.empty(len(body), dtype=dtype)
    out[body] = ids
    out[ends] = eod_id
    return out


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _batches(shard: Shard, spec: ShardSpec, report: ShardReport) -> Iterator[tuple[Source, list[str]]]:
    """Non-empty documents in order, in batches of bounded size, each with the source of its last document."""
    texts: list[str] = []
    characters = 0
    source = shard[0].source
    for source, record in _records(shard, spec):
        if isinstance(record, BadRecordError):
            if spec.on_error == "stop":
                raise record
            report.lines_skipped += 1
        elif not record or record.isspace():
            report.empty_documents += 1
        else:
            texts.append(record)
            characters += len(record)
            if characters >= BATCH_CHARACTERS:
                yield source, texts
                texts, characters = [], 0
    if texts:
        yield source, texts


def _records(shard: Shard, spec: ShardSpec) -> Iterator[tuple[Source, str | BadRecordError]]:
    for piece in shard:
        for record in read_piece(piece, spec.field, spec.txt_unit, spec.chat.render if spec.chat else None):
            yield piece.source, record


def _write_batch(
    texts: list[str],
    spec: ShardSpec,
    encoder: Encoder,
    files: Mapping[tuple[str, str], BinaryIO],
    report: ShardReport,
) -> int:
    """Encode one batch and append it to the shard files; returns its UTF-8 bytes."""
    import numpy as np

    raw = [text.encode("utf-8") for text in texts]
    key = str(spec.seed).encode()
    joined = b"".join([hashlib.blake2b(text, digest_size=16, key=key).digest() for text in raw])
    digests = np.frombuffer(joined, dtype="<u8").reshape(-1, 2)
    splits = choose_split(digests[:, 0], spec.shares)
    for moved, to in spec.moves.items():
        splits[digests[:, 0] == np.uint64(moved)] = to
    # sort by split, so that each split is one slice of the batch
    order = np.argsort(splits, kind="stable")
    raw = [raw[number] for number in order]
    ids, lengths = encoder.encode([texts[number] for number in order], raw)
    flat = append_eod(ids, lengths, spec.eod_id, spec.dtype)
    docs = np.empty(len(texts), dtype=DOC_RECORD)
    docs["tokens"], docs["bytes"] = lengths + 1, [len(text) for text in raw]
    docs["high"], docs["low"] = digests[order].T
    first_doc = first_id = 0
    for number, split in enumerate(SPLITS):
        last_doc = first_doc + int(np.count_nonzero(splits == number))
        last_id = first_id + int(docs["tokens"][first_doc:last_doc].sum())
        files[split, "bin"].write(flat[first_id:last_id].tobytes())
        files[split, "docs"].write(docs[first_doc:last_doc].tobytes())
        report.documents[split] += last_doc - first_doc
        first_doc, first_id = last_doc, last_id
    return int(docs["bytes"].sum())
