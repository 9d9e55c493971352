"""Print what a corpus holds: counts, lengths, ids against the vocabulary, and decoded text with its borders.

Works on a prepared folder, and on the prefix of any .bin/.idx pair, which then needs a tokenizer to be decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.commands import launch_command
from common.errors import UserError
from data.indexed import HEADER, check_prefix, read_index
from data.manifest import FILE_NAME, SPLITS, Manifest, load_manifest
from data.tokenizer import eod_id, load_tokenizer, vocab_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SAMPLE_TOKENS = 160
BLOCK_TOKENS = 1 << 24  # read at once


@dataclass(frozen=True)
class Pair:
    """A memory-mapped .bin/.idx pair: ids dtype[n], lengths int32[num_sequences] in tokens, offsets int64 in bytes."""

    name: str
    ids: npt.NDArray[np.integer[Any]]
    lengths: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]


def inspect_corpus(dir_or_prefix: str | Path, samples: int = 3, tokenizer: str | None = None) -> None:
    """Print what a prepared folder, or the .bin/.idx pair of a prefix, holds; of a folder of corpora, a line for each.

    Args:
        dir_or_prefix: a prepared folder, a folder that holds such folders, or a path without .bin and .idx.
        samples: documents to decode from each split.
        tokenizer: folder or hub id; default: the folder `tokenizer` beside the files.

    Raises:
        UserError: neither a prepared folder nor a .bin/.idx pair.
        PreflightError: the pair is damaged.
    """
    from rich.console import Console

    console = Console(highlight=False)
    path = Path(dir_or_prefix)
    if path.is_dir() and not (path / FILE_NAME).is_file() and (found := find_corpora(path)):
        console.print(_corpora_table(path, found))
        print(f"one of them: {launch_command('data', 'inspect', str(found[0]))}")
        return
    manifest = load_manifest(path) if path.is_dir() else None
    if manifest is None and not Path(f"{path}.idx").exists() and not Path(f"{path}.bin").exists():
        if path.suffix in (".bin", ".idx"):
            raise check_prefix(path)[0]
        raise UserError(
            f"{path} is no corpus",
            expected=f"a folder with {FILE_NAME}, or a prefix with {path.name}.bin and {path.name}.idx",
            found="neither",
            do="check the path",
        )
    pairs = [open_pair(path / name) for name in SPLITS] if manifest else [open_pair(path)]
    default = (path if manifest else path.parent) / "tokenizer"
    name = tokenizer or (str(default) if default.is_dir() else None)
    decoder = load_tokenizer(name) if name else None
    if manifest:
        console.print(_facts_table(manifest))
    console.print(_lengths_table(pairs, vocab_size(decoder) if decoder else None))
    if decoder is None:
        console.print("no tokenizer found beside the files: nothing is decoded")
        return
    for pair in pairs:
        _print_samples(console, pair, decoder, samples)


def find_corpora(folder: Path) -> list[Path]:
    """The prepared corpora below a folder, sorted by path; unfinished ones (in hidden folders) left out."""
    found = (path.parent for path in folder.rglob(FILE_NAME))
    return sorted(one for one in found if not any(part.startswith(".") for part in one.relative_to(folder).parts))


def _corpora_table(folder: Path, corpora: list[Path]) -> Any:
    from rich.table import Table

    table = Table(title=f"{len(corpora)} corpora in {folder}, tokens per split", title_justify="left", box=None)
    table.add_column("corpus", overflow="fold")
    for column in ("documents", *SPLITS, "tokenizer"):
        table.add_column(column, justify="right")
    for corpus in corpora:
        manifest = load_manifest(corpus)
        splits = manifest.splits
        table.add_row(
            str(corpus.relative_to(folder)),
            f"{sum(split.documents for split in splits.values()):,}",
            *(f"{splits[name].tokens:,}" for name in SPLITS),
            manifest.tokenizer.fingerprint[:8],
        )
    return table


def open_pair(prefix: Path) -> Pair:
    """Memory-map a .bin/.idx pair after all its checks.

    Raises:
        PreflightError: the first finding of the checks.
    """
    import numpy as np

    for finding in check_prefix(prefix):
        raise finding
    facts = read_index(prefix)
    ids = np.memmap(f"{prefix}.bin", dtype=facts.dtype, mode="r")
    lengths = np.memmap(f"{prefix}.idx", dtype="<i4", mode="r", offset=HEADER.size, shape=(facts.num_sequences,))
    place, count = HEADER.size + 4 * facts.num_sequences, (facts.num_sequences,)
    offsets = np.memmap(f"{prefix}.idx", dtype="<i8", mode="r", offset=place, shape=count)
    return Pair(prefix.name, ids, lengths, offsets)


def id_range(ids: Any) -> tuple[int, int]:
    """Lowest and highest id, read in blocks."""
    blocks = [ids[start : start + BLOCK_TOKENS] for start in range(0, len(ids), BLOCK_TOKENS)]
    return min(int(block.min()) for block in blocks), max(int(block.max()) for block in blocks)


def _facts_table(manifest: Manifest) -> Any:
    from rich.table import Table

    table = Table(title=f"corpus {manifest.name}", show_header=False, title_justify="left")
    tokenizer, encoding = manifest.tokenizer, manifest.encoding
    rows = {
        "tokenizer": f"{tokenizer.source} ({tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:16]})",
        "end of document": f"{tokenizer.eod_token} = {tokenizer.eod_id}, pad {tokenizer.pad_id}",
        "ids by": f"{encoding.path}, {encoding.documents_checked:,} documents checked against HF, "
        f"{encoding.documents_by_hf:,} by HF, {encoding.batches_redone} of {encoding.batches} batches redone",
        "stored as": manifest.dtype,
        "split": ", ".join(f"{name} {share:.2%}" for name, share in manifest.shares.items())
        + f", seed {manifest.seed}",
        "text field": manifest.text_field,
        "dedup": manifest.dedup,
        "left out": f"{manifest.lines_skipped:,} skipped records, {manifest.empty_documents:,} empty documents",
        "spell a special token": f"{manifest.special_text_documents:,} documents",
        "sources": "\n".join(f"{source.path} ({source.bytes / 1e6:,.2f} MB)" for source in manifest.sources[:5])
        + (f"\nand {len(manifest.sources) - 5:,} more" if len(manifest.sources) > 5 else ""),
        "text": ", ".join(f"{name} {split.text_bytes / 1e6:,.2f} MB" for name, split in manifest.splits.items()),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _lengths_table(pairs: list[Pair], size: int | None) -> Any:
    import numpy as np
    from rich.table import Table

    table = Table(title="lengths in tokens, end of document included", title_justify="left")
    table.add_column("")
    cells: list[dict[str, str]] = []
    for pair in pairs:
        table.add_column(pair.name, justify="right")
        low, high = id_range(pair.ids)
        median, p99 = np.percentile(pair.lengths, [50, 99])
        numbers = {"documents": len(pair.lengths), "tokens": pair.lengths.sum(dtype=np.int64)}
        numbers |= {"shortest": pair.lengths.min()}
        numbers |= {"median": median, "mean": pair.lengths.mean(), "p99": p99, "longest": pair.lengths.max()}
        vocabulary = "unknown" if size is None else f"{size:,} ok" if high < size else f"{size:,} EXCEEDED"
        cells.append({name: f"{float(number):,.0f}" for name, number in numbers.items()})
        cells[-1] |= {"ids": f"{low}..{high}", "vocabulary": vocabulary}
    for name in cells[0]:
        table.add_row(name, *(column[name] for column in cells))
    return table


def _print_samples(console: Any, pair: Pair, tokenizer: Any, samples: int) -> None:
    """Print some documents, evenly spaced: their first and last tokens, and how each document ends."""
    import numpy as np
    from rich.panel import Panel
    from rich.text import Text

    count = min(samples, len(pair.lengths))
    for number in np.linspace(0, len(pair.lengths) - 1, count, dtype=int).tolist():
        start = int(pair.offsets[number]) // pair.ids.itemsize  # an adopted corpus leaves documents out
        ids = pair.ids[start : start + int(pair.lengths[number])].tolist()
        body = Text(tokenizer.decode(ids[:SAMPLE_TOKENS]))
        if len(ids) > SAMPLE_TOKENS:
            body.append(f"\n[... {len(ids) - SAMPLE_TOKENS:,} more tokens ...]\n", style="dim")
            body.append(tokenizer.decode(ids[-min(12, len(ids) - SAMPLE_TOKENS) :]))
        ends = ids[-1] == eod_id(tokenizer)
        border = f"ends with id {ids[-1]}" + ("" if ends else ", which is NOT the end-of-document token")
        console.print(Panel(body, title=f"{pair.name} document {number} ({len(ids):,} tokens)", subtitle=border))
