"""The text that the shipped tasks are made from: documents that no run of this project trains on, by domain."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from common.commands import launch_command
from common.errors import UserError
from common.files import file_sha256
from common.json_files import read_json_object
from common.rundir import RunDir
from data.inspect import find_corpora, open_pair
from data.manifest import FILE_NAME, load_manifest
from data.prepare.readers import read_piece
from data.prepare.record_errors import BadRecordError
from data.prepare.sources import find_sources, plan_shards

log = logging.getLogger("launch")
MAX_DOCUMENTS = 400  # of a domain; the tasks need fewer
SAMPLE = Path("corpora/sample")
_SPLITS = ("test", "validation")  # in this order; training reads neither


def default_domains(run: RunDir | None) -> dict[str, str]:
    """Domain -> corpus: those of the run, by the names of its blend; without a run the sample corpora.

    Raises:
        UserError: the corpora of the run are not here, or there is no run and no sample.
    """
    recorded = read_json_object(run.data) or {} if run is not None else {}
    if run is not None and recorded:
        folders = {folder: str(row.get("absolute_path", folder)) for folder, row in recorded.items()}
        here = {folder: path for folder, path in folders.items() if (Path(path) / FILE_NAME).is_file()}
        gone = sorted(set(folders) - set(here))
        if not here:
            raise UserError(
                f"the corpora of the run {run.name} are not here, and so is the text that it has not read",
                expected=", ".join(folders.values()),
                found="none of them",
                do="put them back, or name other text that the run has not read with --text",
            )
        if gone:
            log.warning("evaluation: without the corpora %s, which are not here any more", ", ".join(gone))
        names = _blend_names(run)
        return _by_name((names.get(folder, ""), path) for folder, path in here.items())
    if SAMPLE.is_dir() and (corpora_of_sample := find_corpora(SAMPLE)):
        return name_texts([str(folder) for folder in corpora_of_sample])
    raise UserError(
        "there is no text to make the tasks from",
        expected=f"the corpora of the run, or the sample corpora in {SAMPLE}",
        found="neither",
        do=f"{launch_command('data', 'sample')}, or --text with a prepared corpus or files that were not trained on",
    )


def _blend_names(run: RunDir) -> dict[str, str]:
    """Folder -> name of the domain, of a run with a blend."""
    blend = read_json_object(run.blend) or {}
    domains = [*blend.get("domains", []), *blend.get("validated_only", [])]
    return {str(one["folder"]): str(one["name"]) for one in domains}


def name_texts(texts: Sequence[str]) -> dict[str, str]:
    """Domain -> text, named after its folder or file.

    Raises:
        UserError: two of the same name.
    """
    return _by_name(("", text) for text in texts)


def _by_name(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Domain -> text, of (name or "", text)."""
    found: dict[str, str] = {}
    for name, text in texts:
        domain = _domain_name(name or Path(text).name.split(".")[0])
        if domain in found:
            raise UserError(
                f"two texts are named {domain!r}",
                expected="a folder or file name of its own for each domain",
                found=f"{found[domain]}, {text}",
                do="rename one of them, or put both files into one folder and name that",
            )
        found[domain] = text
    return found


def read_domains(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Documents of each domain.

    Args:
        texts: domain -> prepared corpus (its test split is read), or a file, glob or folder that `data prepare` reads.

    Raises:
        UserError: a text that does not exist, cannot be read or holds nothing.
    """
    found: dict[str, list[str]] = {}
    for name, text in texts.items():
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


def warn_of_training_text(texts: Iterable[str], run: RunDir | None) -> None:
    """Warn of files that the run's corpora were made from: most of their documents have been trained on.

    Files are compared by size and SHA-256; documents that were copied into another file are not found.
    """
    recorded = read_json_object(run.data) or {} if run is not None else {}
    sources = {
        (source["bytes"], source["sha256"]): corpus
        for corpus, manifest in recorded.items()
        for source in manifest.get("sources", [])
    }
    sizes = {size for size, _ in sources}
    for text in texts:
        if (Path(text) / FILE_NAME).is_file():
            continue
        for path in [Path(source.path) for source in find_sources([text], exclude=Path("/nonexistent"))]:
            if not path.is_file() or (size := path.stat().st_size) not in sizes:
                continue
            if corpus := sources.get((size, file_sha256(path))):
                log.warning(
                    "evaluation: the run's corpus %s was made from %s, so that the run has trained on most of it;"
                    " --text %s reads what was left out",
                    *(corpus, path, corpus),
                )


def _domain_name(name: str) -> str:
    """Letters, digits and underscores: it becomes part of a task's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in name).strip("_") or "text"


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
    end = manifest.tokenizer.eod_id
    pair, start = open_pair(folder / split), 0
    for length in pair.lengths.tolist():
        ids = pair.ids[start : start + length].tolist()
        start += length
        # the control tokens of a chat are part of its text; the end of the document is not
        yield tokenizer.decode(ids[:-1] if ids[-1:] == [end] else ids, skip_special_tokens=False)


def _read_files(text: str) -> Iterator[str]:
    sources = find_sources([text], exclude=Path("/nonexistent"))
    for shard in plan_shards(sources, "file", 1 << 30):
        for piece in shard:
            for document in read_piece(piece, "text", "file"):
                if isinstance(document, BadRecordError):
                    raise document
                yield document
