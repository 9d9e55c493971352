"""Find the files of a corpus, and divide them into shards of work.

A shard is a list of pieces; a piece is a range of one file that begins and ends between two documents.
The division depends on the files and on `shard_bytes` only, never on the number of workers, so that a preparation can
be continued on another machine and gives the same bytes.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from common.errors import UserError
from data.prepare.hub_sources import find_hub_files
from data.prepare.input_files import BUFFER_BYTES, Piece, Shard, Source, open_parquet, open_stored

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), "txt"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
# suffixes for whose files --as-text is suggested
SOURCE_CODE = (
    ".py .c .h .cc .cpp .cu .cuh .java .js .ts .go .rs .sh .sql .rb .php .cs .kt .scala .swift .lua .pl .r .tex"
)
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
SUPPORTED = ".txt .md .rst .html .jsonl .json .ndjson .csv (each also with .gz or .zst), .parquet and .arrow"
log = logging.getLogger("launch")


def classify(path: str, as_text: Collection[str] = ()) -> tuple[str, str | None] | None:
    """Format and compression by the extensions of a file name; None when it is not a supported input.

    Args:
        as_text: more suffixes, in lower case, of files to read as text.
    """
    name = Path(path.lower())
    compression = COMPRESSIONS.get(name.suffix)
    suffix = name.with_suffix("").suffix if compression else name.suffix
    kind = "txt" if suffix in as_text else FORMATS.get(suffix)
    if kind is None or (kind in ("parquet", "arrow") and compression is not None):
        return None
    return kind, compression


def find_sources(
    inputs: Iterable[str],
    exclude: Path,
    as_text: Collection[str] = (),
    recorded: Mapping[str, str] | None = None,
) -> list[Source]:
    """Resolve files, globs and folders (searched recursively, without hidden names) to sources.

    Inputs keep their order, the files of one input are sorted by path, and a file named twice counts once.

    Args:
        exclude: the output folder, which may lie inside an input folder.
        as_text: more suffixes of files to read as text; other files in a folder are left out, counted and logged.
        recorded: commits of data sets of the hub that the output was begun with.

    Raises:
        UserError: an input that matches nothing, or a file or glob that names a file of an unknown kind.
    """
    found: dict[str, Source] = {}
    for text in inputs:
        if text.startswith("hf://"):
            found.update((source.path, source) for source in _find_on_hub(text, recorded or {}, as_text))
            continue
        matches = [path for path in _expand(text, as_text) if not path.is_relative_to(exclude.resolve())]
        if not matches:
            raise _no_match_error(text)
        for path in matches:
            kind = classify(path.name, as_text)
            if kind is None:
                raise _unknown_kind_error(str(path))
            facts = path.stat()
            found[str(path)] = Source(str(path), *kind, facts.st_size, facts.st_mtime_ns)
    return list(found.values())


def _find_on_hub(text: str, recorded: Mapping[str, str], as_text: Collection[str]) -> list[Source]:
    files = find_hub_files(text, recorded)
    kinds = [(path, classify(path, as_text), size, sha256) for path, size, sha256 in files]
    found = [Source(path, *kind, size, 0, sha256) for path, kind, size, sha256 in kinds if kind and kind[0] != "arrow"]
    if not found:
        raise UserError(
            f"{text} holds no files that can be read",
            expected=SUPPORTED,
            found=", ".join(sorted({Path(path).suffix or path for path, *_ in files})) or "no files",
            do="try the hub's own conversion: hf://OWNER/NAME@refs%2Fconvert%2Fparquet",
        )
    commit, gigabytes = found[0].path.split("@")[1][:40], sum(source.bytes for source in found) / 1e9
    log.info("%s: %d file(s), %.2f GB, of commit %s", text, len(found), gigabytes, commit)
    return found


def plan_shards(sources: list[Source], txt_unit: str, shard_bytes: int) -> list[Shard]:
    """Cut the sources, in order, into shards of about `shard_bytes` input bytes each."""
    shards: list[Shard] = []
    current: list[Piece] = []
    size = 0
    for source in sources:
        for piece in _divide(source, txt_unit, shard_bytes):
            current.append(piece)
            size += piece.bytes
            if size >= shard_bytes:
                shards.append(tuple(current))
                current, size = [], 0
    return [*shards, tuple(current)] if current else shards


def _expand(text: str, as_text: Collection[str]) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_dir():
        files = sorted(_walk(path))
        _log_left_out(path, [file for file in files if not classify(file.name, as_text)])
        return [match.resolve() for match in files if classify(match.name, as_text)]
    if path.is_file():
        return [path.resolve()]
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207 (Path.glob refuses absolute patterns)
    return [match.resolve() for match in matches if match.is_file()]


def _log_left_out(folder: Path, files: list[Path]) -> None:
    """Say which files of a folder are no input, most frequent suffix first."""
    if not files:
        return
    counts = Counter(file.suffix.lower() or "without suffix" for file in files).most_common()
    shown = ", ".join(f"{count:,} {suffix}" for suffix, count in counts[:8]) + (", ..." if len(counts) > 8 else "")
    code = [suffix for suffix, _ in counts if suffix in SOURCE_CODE.split()]
    hint = f"; --as-text {','.join(code)} reads them as text" if code else ""
    log.warning("left out of %s: %s file(s) of other kinds (%s)%s", folder, f"{len(files):,}", shown, hint)


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "dataset_dict.json" in names:
            raise _several_splits_error(Path(root))
        if {"state.json", "dataset_info.json"} <= set(names):  # datasets' save_to_disk: the other files describe it
            names = [name for name in names if name.endswith(".arrow")]
        yield from (Path(root, name) for name in names if not name.startswith("."))


def _divide(source: Source, txt_unit: str, shard_bytes: int) -> Iterator[Piece]:
    if source.bytes == 0:
        return
    if source.format == "parquet":
        yield from _divide_parquet(source, shard_bytes)
        return
    whole = (
        source.compression or source.format in ("csv", "html", "arrow") or (source.format, txt_unit) == ("txt", "file")
    )
    if whole or source.bytes <= shard_bytes:
        yield Piece(source, 0, -1, source.bytes)
        return
    paragraph = (source.format, txt_unit) == ("txt", "paragraph")
    start = 0
    while start < source.bytes:
        end = _next_boundary(source, start + shard_bytes, paragraph)
        yield Piece(source, start, end, end - start)
        start = end


def _next_boundary(source: Source, offset: int, paragraph: bool) -> int:
    """The first byte at or after `offset` at which a document may begin."""
    if offset >= source.bytes:
        return source.bytes
    with open_stored(source, BUFFER_BYTES) as file:
        file.seek(offset)
        if not paragraph:
            file.readline()
            return min(file.tell(), source.bytes)
        window = b""
        while block := file.read(BUFFER_BYTES):
            window += block
            if match := BLANK_LINE.search(window):
                return min(offset + match.end(), source.bytes)
    return source.bytes


def _divide_parquet(source: Source, shard_bytes: int) -> Iterator[Piece]:
    """Runs of row groups whose compressed size reaches `shard_bytes` (their text is larger)."""
    metadata = open_parquet(source).metadata
    groups = metadata.num_row_groups
    share = max(1, source.bytes // max(groups, 1))
    start = size = 0
    for group in range(groups):
        size += share
        if size >= shard_bytes or group == groups - 1:
            yield Piece(source, start, group + 1, size)
            start, size = group + 1, 0


def _several_splits_error(folder: Path) -> UserError:
    splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
    return UserError(
        f"{folder} holds several splits of a data set",
        expected="one split, so that test data are not trained on",
        found=", ".join(splits) or "dataset_dict.json without a split",
        do=f"give {folder / splits[0]}" if splits else "save the data set again",
    )


def _no_match_error(text: str) -> UserError:
    is_dir = Path(text).expanduser().is_dir()
    return UserError(
        f"no input file matches {text!r}",
        expected=f"a file, glob or folder with {SUPPORTED}",
        found="a folder without any such file" if is_dir else "nothing",
        do="check the path (quote a glob, so that the shell does not expand it)",
    )


def _unknown_kind_error(path: str) -> UserError:
    return UserError(
        f"{path}: unknown kind of file",
        expected=SUPPORTED,
        found=f"extension {''.join(Path(path).suffixes[-2:]) or 'none'}",
        do=f"--as-text {Path(path).suffix.lower()}, if it is plain text; else convert it, or give a narrower glob",
    )
