"""How often a run has read each document of its corpora, in which stage and attempt, by its token ledger.

The ledger names windows of Megatron's shuffled order. What a window holds follows from the corpus and the seed, so the
same indices are built again here, in a folder that is deleted afterwards, and the tokens are counted by document.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from common.errors import UserError
from common.rundir import RunDir
from data.datasets import WholeMaskGPTDataset, build_windows
from data.ledger import Corpus, Ledger, Range, read_ledger
from data.manifest import load_manifest
from data.ordered_dataset import check_size, find_windows

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from numpy.typing import NDArray

MOST_READ = 4  # times; documents that were read as often or more are counted together


@dataclass(frozen=True)
class DocumentsRead:
    """What one stage of one attempt, or the whole run, has read of a corpus.

    Args:
        tokens: int64[documents], the tokens of each document that were read, repeated ones each time.
        lengths: int64[documents], the tokens that each document has.
    """

    corpus: str
    stage: str
    attempt: int | None
    tokens: NDArray[Any]
    lengths: NDArray[Any]

    def row(self) -> dict[str, Any]:
        """The numbers of documents by how often they were read, as whole readings; `partly` is less than one."""
        times = numpy.minimum(self.tokens // numpy.maximum(self.lengths, 1), MOST_READ)
        counts = numpy.bincount(times, minlength=MOST_READ + 1).tolist()
        never = int((self.tokens == 0).sum())
        return {
            "domain": self.corpus,
            "stage": self.stage,
            "attempt": self.attempt,
            "documents": len(self.lengths),
            "tokens": int(self.tokens.sum()),
            "not read": never,
            "partly": counts[0] - never,
            **{f"{number}x": counts[number] for number in range(1, MOST_READ)},
            f"{MOST_READ}x+": counts[MOST_READ],
        }


def count_documents(ledger: Ledger, cache: Path) -> Iterator[DocumentsRead]:
    """For each corpus what each stage of each attempt has read of it, in their order, and then the whole run.

    Args:
        cache: folder for the indices that are built.

    Raises:
        UserError: a corpus has another number of samples than the ledger counts with.
    """
    for corpus in ledger.corpora:
        ranges = [one for one in ledger.ranges() if one.corpus == corpus.name]
        if not ranges:
            continue
        datasets = _build_datasets(ledger, corpus, ranges, cache)
        lengths = next(iter(datasets.values())).dataset.sequence_lengths.astype(numpy.int64)
        total = numpy.zeros_like(lengths)
        for one in ranges:
            tokens = _count_range(ledger, corpus, one, datasets)
            total += tokens
            yield DocumentsRead(corpus.name, one.stage, one.attempt, tokens, lengths)
        yield DocumentsRead(corpus.name, "whole run", None, total, lengths)


def _build_datasets(ledger: Ledger, corpus: Corpus, ranges: list[Range], cache: Path) -> dict[bool, GPTDataset]:
    """The windows of the corpus: True for what Megatron has laid out, False for one reading."""
    config = GPTDatasetConfig(
        random_seed=ledger.seed,
        sequence_length=ledger.seq_length,
        blend=([str(Path(corpus.folder) / "train")], None),
        split="1,0,0",
        tokenizer=_NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(cache),
    )
    found = {}
    for laid_out in {
        corpus.laid_out_size > 0 and one == 0 for each in ranges for one in (each.first_pass, each.last_pass)
    }:
        number, size = (corpus.laid_out, corpus.laid_out_size) if laid_out else (None, corpus.windows)
        found[laid_out] = build_windows(corpus, number, WholeMaskGPTDataset, config)
        check_size(corpus, size, found[laid_out])
    return found


class _NoTokenizer:
    """What Megatron's dataset asks of a tokenizer; no token is decoded here."""

    eod = pad = 0
    unique_identifiers: dict[str, str] = {"class": "none"}  # noqa: RUF012 - as Megatron's tokenizers have it


def _count_range(ledger: Ledger, corpus: Corpus, one: Range, datasets: dict[bool, GPTDataset]) -> NDArray[Any]:
    """int64[documents]: the tokens of each document in a range of the ledger."""
    first = corpus.number(one.first_pass, one.first)
    passes, windows = find_windows(ledger, corpus, first, one.samples)
    laid_out = (passes == 0) & (corpus.laid_out_size > 0)
    counts = [_count_tokens(datasets[kind], windows[laid_out == kind]) for kind in datasets]
    total: NDArray[Any] = numpy.sum(counts, axis=0)
    return total


def _count_tokens(dataset: GPTDataset, windows: NDArray[Any]) -> NDArray[Any]:
    """int64[documents]: the tokens of each document that these windows read, repeated ones each time.

    Windows are consecutive pieces of the documents in their shuffled order, so what was read before any place of that
    sequence is a sum over windows.
    """
    seq_length = dataset.config.sequence_length
    times = numpy.bincount(dataset.shuffle_index[windows], minlength=len(dataset))  # of each piece of the sequence
    before = numpy.concatenate([[0], numpy.cumsum(times * seq_length)])
    lengths = dataset.dataset.sequence_lengths.astype(numpy.int64)[dataset.document_index]
    ends = numpy.minimum(numpy.cumsum(lengths), len(dataset) * seq_length)
    piece, rest = numpy.divmod(ends, seq_length)
    read = before[piece] + numpy.append(times, 0)[piece] * rest
    in_document = numpy.diff(read, prepend=0)
    found = numpy.zeros(len(dataset.dataset), dtype=numpy.int64)
    numpy.add.at(found, dataset.document_index, in_document)
    return found


def count_run(run: RunDir) -> list[dict[str, Any]]:
    """The rows of the table, by domain, stage and attempt, with a row for the whole run after those of each domain.

    Raises:
        UserError: the run has no token ledger, or a corpus is no longer what the run has read.
    """
    ledger = read_ledger(run.ledger)
    for corpus in ledger.corpora:
        content = load_manifest(Path(corpus.folder)).splits["train"].bin_sha256
        if content != corpus.content:
            raise UserError(
                f"{corpus.folder} is not the corpus that {run.path} has read",
                expected=f"train.bin {corpus.content[:16]}",
                found=content[:16],
                do="bring back the corpus as it was",
            )
    with tempfile.TemporaryDirectory() as cache:
        return [one.row() for one in count_documents(ledger, Path(cache))]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `count_run`."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    if not rows:
        print("nothing was read yet")
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int) else "left", no_wrap=True)
    for row in rows:
        cells = (
            "all" if value is None else f"{value:,}" if isinstance(value, int) else value for value in row.values()
        )
        table.add_row(*cells, end_section=row["attempt"] is None)
    console = Console(highlight=False)
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum)
    console.print(table)  # a narrow terminal wraps lines, and cuts no number
