"""The manifest of a prepared corpus: what it was made of, with which tokenizer, and how much it holds.

`DIR/manifest.json` is the last file that `data prepare` puts into DIR: where it exists, the corpus is complete.
Imports the standard library only, so that checks before a run cost nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.commands import launch_command
from common.errors import UserError
from common.json_files import parse_json

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
PARTIAL_NAME = ".partial"  # folder of a preparation that is going on, or was interrupted
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class SourceFacts:
    """One input file: absolute path, size in bytes, SHA-256 of its bytes (as stored, compressed or not)."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitFacts:
    """One split as written.

    Args:
        documents: documents kept.
        tokens: ids in the .bin, including the end-of-document id after each document.
        text_bytes: UTF-8 bytes of the kept text, without end-of-document tokens (the denominator of bits per byte).
        duplicates_dropped: documents left out because an earlier one has the same text.
        bin_sha256: SHA-256 of the .bin file.
        idx_sha256: SHA-256 of the .idx file.
        bin_blocks: hashes of blocks of the .bin file (data/block_hashes.py); manifests of earlier versions have none.
    """

    documents: int
    tokens: int
    text_bytes: int
    duplicates_dropped: int
    bin_sha256: str
    idx_sha256: str
    bin_blocks: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer that produced the ids; its files are in DIR/tokenizer.

    Args:
        source: the folder or hub id that the user gave.
        fingerprint: as `data.tokenizer.fingerprint` computes it.
        vocab_size: `len(tokenizer)`; every id is below it.
        eod_id: id appended to each document.
        eod_token: its text.
        pad_id: the tokenizer's padding id, None if it has none.
    """

    source: str
    fingerprint: str
    vocab_size: int
    eod_id: int
    eod_token: str
    pad_id: int | None


@dataclass(frozen=True)
class EncodingFacts:
    """Which library produced the ids, and how far they were checked against the HF tokenizer.

    Args:
        path: "gigatoken", "hf", or "mixed" (gigatoken, but some batches differed and were encoded again by hf).
        documents_checked: documents whose gigatoken ids were compared with the HF tokenizer's.
        documents_by_hf: single documents encoded by hf because of characters that Unicode versions differ on.
        batches: batches encoded in all.
        batches_redone: batches whose sample differed and which the HF tokenizer encoded again.
    """

    path: str
    documents_checked: int
    documents_by_hf: int
    batches: int
    batches_redone: int


@dataclass(frozen=True)
class Manifest:
    """All facts about a prepared corpus.

    Args:
        name: name of the corpus (its folder).
        created_by: versions of the libraries that took part, by name.
        settings: the options that decide the corpus, as `PrepareRequest.settings()` gives them.
        seed: seed of the split hash.
        shares: share of each split, by name, summing to 1.
        text_field: JSON field or column that holds the text.
        dedup: "exact" or "off".
        dtype: "uint16" or "int32", the type of the ids in the .bin files.
        lines_skipped: records left out under `on_error="skip"`, in all splits together.
        empty_documents: records without any visible text, left out.
        special_text_documents: documents whose text spells a special token of the tokenizer.
        splits: by name, see `SPLITS`.
    """

    name: str
    created_by: dict[str, str]
    settings: dict[str, Any]
    seed: int
    shares: dict[str, float]
    text_field: str
    dedup: str
    dtype: str
    lines_skipped: int
    empty_documents: int
    special_text_documents: int
    encoding: EncodingFacts
    tokenizer: TokenizerFacts
    splits: dict[str, SplitFacts]
    sources: list[SourceFacts]
    format_version: int = FORMAT_VERSION

    def save(self, folder: Path) -> None:
        """Write `folder/manifest.json` in one step, so that a reader never sees half of it."""
        target = folder / FILE_NAME
        part = target.with_suffix(".json.tmp")
        with part.open("w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)


def load_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared corpus.

    Raises:
        UserError: `folder` holds no manifest, or one that this version cannot read.
    """
    path = Path(folder) / FILE_NAME
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _not_a_corpus_error(path) from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise _unreadable_error(path, str(error)) from None
    if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
        version = raw.get("format_version") if isinstance(raw, dict) else type(raw).__name__
        raise _unreadable_error(path, f"format version {version}")
    try:
        return _parse(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable_error(path, f"a field is missing or unknown: {error}") from None


def _parse(raw: dict[str, Any]) -> Manifest:
    nested = {
        "encoding": EncodingFacts(**raw["encoding"]),
        "tokenizer": TokenizerFacts(**raw["tokenizer"]),
        "splits": {name: SplitFacts(**raw["splits"][name]) for name in SPLITS},
        "sources": [SourceFacts(**source) for source in raw["sources"]],
    }
    return Manifest(**{**raw, **nested})


def _not_a_corpus_error(path: Path) -> UserError:
    folder = path.parent
    prepare = launch_command("data", "prepare", "INPUT", "--output", str(folder), "--tokenizer", "NAME")
    if (folder / PARTIAL_NAME).is_dir():
        found = f"an interrupted preparation ({PARTIAL_NAME}), no {FILE_NAME}"
        do = "run the same `data prepare` command again: it continues where it stopped"
    elif folder.is_dir():
        found = f"a folder without {FILE_NAME}"
        do = prepare
    else:
        found = "no such folder"
        do = f"{prepare}, or correct the path"
    return UserError(f"{folder} is not a prepared corpus", expected=f"a folder with {FILE_NAME}", found=found, do=do)


def _unreadable_error(path: Path, found: str) -> UserError:
    return UserError(
        f"{path} cannot be read",
        expected=f"a manifest of format version {FORMAT_VERSION}",
        found=found,
        do="prepare the corpus again with --overwrite",
    )
