"""The text that the shipped tasks are made from: documents that no run of this project trains on, by domain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from common.commands import launch_command
from common.errors import UserError
from common.json_files import read_json_object
from common.rundir import RunDir
from data.inspect import find_corpora, open_pair
from data.manifest import FILE_NAME, load_manifest
from data.prepare.readers import read_piece
from data.prepare.record_errors import BadRecordError
from data.prepare.sources import find_sources, plan_shards

MAX_DOCUMENTS = 400  # of a domain; the tasks need fewer
SAMPLE = Path("corpora/sample")
_SPLITS = ("test", "validation")  # in this order; training reads neither


def default_text(run: RunDir | None) -> list[str]:
    """The corpora of a run, without one the sample corpora.

    Raises:
        UserError: neither exists here.
    """
    if run is not None:
        corpora = read_json_object(run.data) or {}
        rows = [(folder, row) for folder, row in corpora.items() if isinstance(row, dict)]
        found = [str(row.get("absolute_path", folder)) for folder, row in rows]
        if found := [folder for folder in found if (Path(folder) / FILE_NAME).is_file()]:
            return found
    if SAMPLE.is_dir() and (corpora_of_sample := find_corpora(SAMPLE)):
        return [str(folder) for folder in corpora_of_sample]
    raise UserError(
        "there is no text to make the tasks from",
        expected=f"the corpora of the run, or the sample corpora in {SAMPLE}",
        found="neither",
        do=f"{launch_command('data', 'sample')}, or --text with a prepared corpus or files that were not trained on",
    )


def read_domains(inputs: Sequence[str]) -> dict[str, list[str]]:
    """Documents of each domain.

    Args:
        inputs: prepared corpora (their test split is read), or files, globs and folders that `data prepare` reads. The
            domain is named after the folder or file.

    Raises:
        UserError: an input that does not exist, cannot be read or holds no text, or two of the same name.
    """
    found: dict[str, list[str]] = {}
    for text in inputs:
        name = _domain_name(text)
        if name in found:
            raise UserError(
                f"two texts are named {name!r}",
                expected="a folder or file name of its own for each domain",
                found=", ".join(inputs),
                do="rename one of them, or put both files into one folder and name that",
            )
        documents = _read_corpus(Path(text)) if (Path(text) / FILE_NAME).is_file() else _read_files(text)
        found[name] = [document for _, document in zip(range(MAX_DOCUMENTS), documents, strict=False)]
        if not any(map(str.strip, found[name])):
            raise UserError(
                f"{text} has no held-out text",
                expected="documents with visible text",
                found=f"{len(found[name])} documents",
                do="name another corpus or file with --text",
            )
    return found


def _domain_name(text: str) -> str:
    """Letters, digits and underscores: it becomes part of a task's name."""
    stem = Path(text).name.split(".")[0]
    return "".join(letter if letter.isalnum() else "_" for letter in stem).strip("_") or "text"


def _read_corpus(folder: Path) -> Iterator[str]:
    """The documents of the test split, decoded; of the validation split where the corpus has no test split."""
    from tokenizers import Tokenizer

    manifest = load_manifest(folder)
    split = next((name for name in _SPLITS if manifest.splits[name].documents), None)
    if split is None:
        raise UserError(
            f"{folder} has no text that was left out of training",
            expected="documents in its test or validation split",
            found="all documents are in the training split",
            do="prepare it with --split 98,1,1, or name another text with --text",
        )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    pair, start = open_pair(folder / split), 0
    for length in pair.lengths.tolist():
        ids = pair.ids[start : start + length].tolist()
        start += length
        yield tokenizer.decode(ids, skip_special_tokens=True)  # without the end-of-document token


def _read_files(text: str) -> Iterator[str]:
    sources = find_sources([text], exclude=Path("/nonexistent"))
    for shard in plan_shards(sources, "file", 1 << 30):
        for piece in shard:
            for document in read_piece(piece, "text", "file"):
                if isinstance(document, BadRecordError):
                    raise document
                yield document
