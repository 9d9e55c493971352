"""The sample corpus: two domains, prose and code, made of texts that come with every Python.

Prose is the language reference (`pydoc_data.topics`) and the docstrings of the standard library, code is its sources.
The sources are read as text and not imported, and nothing is downloaded. The same Python version gives the same corpus.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from data.manifest import FILE_NAME, Manifest, load_manifest
from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.tokenizer import END_OF_DOCUMENT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger("launch")
DOMAINS = ("prose", "code")
MAX_CHARACTERS = {"prose": 6_000_000, "code": 6_000_000}
TOKENIZER_TRAINING_CHARACTERS = 3_000_000  # of each domain
MIN_DOCUMENT_CHARACTERS = 200
DOCUMENT_CHARACTERS = 4000
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "idle_test",
    "lib2to3",
    "encodings",
}
# as in Qwen2's tokenizer: contractions, words with one mark before them, single digits, punctuation, white space
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_sample(output: Path, vocab_size: int = 4096, seed: int = 1234) -> None:
    """Write `output/prose` and `output/code` (prepared corpora), `output/tokenizer`, and `output/raw/*.jsonl`.

    Does nothing if they exist already for this vocabulary size and seed.

    Raises:
        UserError: the standard library's sources are not installed, or the folder cannot be written.
    """
    output = Path(output)
    if _is_complete(output, vocab_size, seed):
        log.info("%s: the sample corpus exists already", output)
        return
    documents = {"prose": list(collect_prose()), "code": list(collect_code())}
    (output / "raw").mkdir(parents=True, exist_ok=True)
    for domain, texts in documents.items():
        if not texts:
            raise _no_sources_error()
        _write_jsonl(output / "raw" / f"{domain}.jsonl", domain, texts)
    train_tokenizer(documents, vocab_size).save_pretrained(str(output / "tokenizer"))
    for domain in DOMAINS:
        _prepare_domain(output, domain, seed)


def train_tokenizer(documents: dict[str, list[str]], vocab_size: int) -> Any:
    """Train a Qwen2-style byte-level BPE on equal parts of the domains.

    Returns:
        A transformers Qwen2TokenizerFast with exactly `vocab_size` ids; `<|endoftext|>` is eos and pad.
    """
    from tokenizers import pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model = byte_level_bpe()
    model.train_from_iterator(_training_texts(documents), trainer)
    tokenizer = as_qwen2_tokenizer(model)
    if len(tokenizer) != vocab_size:
        raise UserError(
            "the sample's tokenizer cannot be that large",
            expected=f"{vocab_size} ids",
            found=f"{len(tokenizer)} from the sample's text",
            do="choose a vocabulary between 300 and 30,000",
        )
    return tokenizer


def as_qwen2_tokenizer(model: Tokenizer) -> Any:
    """A trained model as a transformers Qwen2TokenizerFast; `<|endoftext|>` becomes its last id, eos and pad."""
    from transformers.models.qwen2.tokenization_qwen2_fast import Qwen2TokenizerFast

    # as in Qwen2, the control token follows the vocabulary of the merges
    model.add_special_tokens([END_OF_DOCUMENT])
    wrap: Any = Qwen2TokenizerFast  # untyped upstream
    return wrap(tokenizer_object=model, eos_token=END_OF_DOCUMENT, pad_token=END_OF_DOCUMENT, unk_token=None)


def byte_level_bpe() -> Tokenizer:
    """An untrained tokenizer with the normaliser, splitting and decoder of Qwen2."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _prepare_domain(output: Path, domain: str, seed: int) -> Manifest:
    log.info("sample corpus, domain %s:", domain)
    return prepare_corpus(
        PrepareRequest(
            inputs=[str(output / "raw" / f"{domain}.jsonl")],
            output=output / domain,
            tokenizer=str(output / "tokenizer"),
            split="90,5,5",
            seed=seed,
            dedup=True,
            overwrite=True,
        )
    )


def _is_complete(output: Path, vocab_size: int, seed: int) -> bool:
    if not all((output / domain / FILE_NAME).exists() for domain in DOMAINS):
        return False
    try:
        made = [load_manifest(output / domain) for domain in DOMAINS]
    except UserError:  # written in an older format
        return False
    wanted = (vocab_size, seed, made[0].tokenizer.fingerprint)
    return all((m.tokenizer.vocab_size, m.seed, m.tokenizer.fingerprint) == wanted for m in made)


def collect_prose() -> Iterator[str]:
    """The language reference by topic, then the docstrings of each module in documents of a few screens."""
    yield from (_remove_rules(text) for _, text in sorted(_read_topics().items()))
    left = MAX_CHARACTERS["prose"]
    for path, source in _sources():
        for document in _join_docstrings(_docstrings(path, source)):
            left -= len(document)
            if left < 0:
                return
            yield document


def collect_code() -> Iterator[str]:
    """The standard library's source files."""
    left = MAX_CHARACTERS["code"]
    for _, source in _sources():
        left -= len(source)
        if left < 0:
            return
        yield source


def _read_topics() -> dict[str, str]:
    path = _library() / "pydoc_data" / "topics.py"
    if not path.is_file():
        return {}
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict):
            found = ast.literal_eval(value)
    return found


def _sources() -> Iterator[tuple[Path, str]]:
    """Standard library sources in a fixed order, without tests and what was installed beside them."""
    library = _library()
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if SKIPPED_FOLDERS.isdisjoint(parts) and parts[0] != "pydoc_data":
            try:
                yield path, path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue


def _docstrings(path: Path, source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            name = getattr(node, "name", path.stem)
            yield f"{name}\n\n{text}"


def _join_docstrings(docstrings: Iterator[str]) -> Iterator[str]:
    """Join docstrings to documents of about `DOCUMENT_CHARACTERS`; a rest that is too short is left out."""
    part: list[str] = []
    for text in docstrings:
        part.append(text)
        if sum(map(len, part)) >= DOCUMENT_CHARACTERS:
            yield "\n\n".join(part)
            part = []
    rest = "\n\n".join(part)
    if len(rest) >= MIN_DOCUMENT_CHARACTERS:
        yield rest


def _remove_rules(text: str) -> str:
    """Remove the lines of asterisks and equal signs under headings."""
    return re.sub(r"\n[*=~^-]{4,}\n", "\n", text).strip()


def _training_texts(documents: dict[str, list[str]]) -> Iterator[str]:
    for texts in documents.values():
        left = TOKENIZER_TRAINING_CHARACTERS
        for text in texts:
            left -= len(text)
            if left > 0:
                yield text


def _write_jsonl(path: Path, domain: str, texts: list[str]) -> None:
    part = path.with_suffix(".tmp")
    with part.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text, "domain": domain}, ensure_ascii=False) + "\n")
    part.replace(path)


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _no_sources_error() -> UserError:
    return UserError(
        "the sample corpus has no text to read",
        expected=f"the standard library's sources under {_library()}",
        found=f"none for Python {sys.version.split()[0]}",
        do="use a Python that has its sources, or prepare a corpus of your own with data prepare",
    )
