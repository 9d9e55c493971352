"""Text files to a prepared corpus: train, validation and test .bin/.idx, the tokenizer, and a manifest.

    inputs -> sources -> shards -> [workers] shard files -> merged splits -> published, manifest last

All work happens in OUTPUT/.partial. A run that was killed continues from the finished shards; its result is
byte-identical to that of an uninterrupted run, whatever the number of workers.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from data.manifest import SPLITS, EncodingFacts, Manifest, SourceFacts, SplitFacts, TokenizerFacts
from data.prepare import publish, small_corpus
from data.prepare.chat import FORMATS, ChatTemplate
from data.prepare.encode import EncoderSpec, reason_against_gigatoken
from data.prepare.hub_sources import recorded_commits
from data.prepare.input_files import Shard, Source
from data.prepare.merge import merge_split
from data.prepare.progress import show_progress
from data.prepare.request import PrepareRequest
from data.prepare.shard import ShardReport, ShardSpec, report_path
from data.prepare.sources import find_sources, plan_shards
from data.prepare.workers import run_shards
from data.tokenizer import backend_json, eod_id, fingerprint, load_tokenizer, special_tokens, vocab_size

if TYPE_CHECKING:
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

UINT16_VOCAB_LIMIT = 65500  # Megatron stores ids of smaller vocabularies in 16 bits
log = logging.getLogger("launch")


def prepare_corpus(request: PrepareRequest) -> Manifest:
    """Prepare a corpus, continue an interrupted preparation, or return the manifest of the corpus that is there.

    Raises:
        UserError: anything about the inputs, the tokenizer, the output folder or the disk.
    """
    request.check()
    output = Path(request.output).expanduser().absolute()
    recorded = {} if request.overwrite else recorded_commits(output)
    sources = find_sources(request.inputs, output, request.text_suffixes, recorded)
    tokenizer = load_tokenizer(request.tokenizer)
    facts = tokenizer_facts(request.tokenizer, tokenizer)
    if request.chat:
        _check_formats(sources)
        request = replace(request, chat_template=ChatTemplate.of(tokenizer, special_tokens(tokenizer)).source)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with publish.lock_output(output):
            present = publish.find_existing(output, request.settings(), sources, facts, request.overwrite)
            return present or _build(request, output, sources, tokenizer, facts)
    except OSError as error:
        raise publish.explain_os_error(error, output, sources) from error


def _check_formats(sources: list[Source]) -> None:
    if wrong := next((source for source in sources if source.format not in FORMATS), None):
        raise UserError(
            f"{wrong.path} cannot hold messages",
            expected="with --chat: .jsonl, .parquet or .arrow",
            found=f"a .{wrong.format} file",
            do="leave it out, or prepare it without --chat",
        )


def tokenizer_facts(source: str, tokenizer: PreTrainedTokenizerFast) -> TokenizerFacts:
    """What the manifest records about a tokenizer."""
    eod = eod_id(tokenizer)
    return TokenizerFacts(
        source=str(source),
        fingerprint=fingerprint(tokenizer),
        vocab_size=vocab_size(tokenizer),
        eod_id=eod,
        eod_token=str(tokenizer.convert_ids_to_tokens(eod)),
        pad_id=tokenizer.pad_token_id,
    )


def _build(
    request: PrepareRequest,
    output: Path,
    sources: list[Source],
    tokenizer: PreTrainedTokenizerFast,
    facts: TokenizerFacts,
) -> Manifest:
    partial = publish.open_partial(output, request.settings(), sources, facts, request.overwrite)
    if publish.is_built(partial):
        return publish.publish(partial, output)
    moves = small_corpus.load_moves(partial)
    spec = replace(_make_shard_spec(request, partial / "shards", tokenizer, facts), moves=moves or {})
    try:
        shards = plan_shards(sources, request.txt_unit, request.shard_bytes)
        hashes = _encode_shards(request, output, sources, shards, spec)
    except UserError:
        publish.remove_without_shards(partial)
        raise
    if moves is None and (moves := small_corpus.choose_moves(spec.work, len(shards), request.shares)):
        small_corpus.save_moves(partial, moves)
        return _build(request, output, sources, tokenizer, facts)  # encode again, with the moves
    reports = [ShardReport.load(report_path(spec.work, index)) for index in range(len(shards))]
    if problem := _find_empty_split(reports, request, sources):
        shutil.rmtree(partial)
        raise problem
    splits = {
        name: merge_split(spec.work, partial / "out", name, len(shards), request.dedup, spec.dtype) for name in SPLITS
    }
    tokenizer.save_pretrained(partial / "out" / "tokenizer")
    manifest = _make_manifest(request, output, sources, hashes, facts, spec, reports, splits)
    manifest.save(partial / "out")
    _log_summary(manifest)
    return publish.publish(partial, output)


def _make_shard_spec(
    request: PrepareRequest, work: Path, tokenizer: PreTrainedTokenizerFast, facts: TokenizerFacts
) -> ShardSpec:
    encoder = EncoderSpec(
        tokenizer_json=backend_json(tokenizer),
        vocab_size=facts.vocab_size,
        special_tokens=tuple(special_tokens(tokenizer)),
        special_text=request.settings()["special_text"],
        backend="hf",
    )
    reason = "--encoder hf" if request.encoder == "hf" else reason_against_gigatoken(encoder)
    if reason:
        log.warning("encoding with the HF tokenizer, at about 1/10 of gigatoken's speed: %s", reason)
    return ShardSpec(
        work=work,
        encoder=encoder if reason else replace(encoder, backend="gigatoken"),
        dtype="uint16" if facts.vocab_size < UINT16_VOCAB_LIMIT else "int32",
        eod_id=facts.eod_id,
        seed=request.seed,
        shares=request.shares,
        field=request.field,
        txt_unit=request.txt_unit,
        on_error=request.on_error,
        chat=ChatTemplate.of(tokenizer, special_tokens(tokenizer)) if request.chat else None,
    )


def _encode_shards(
    request: PrepareRequest, output: Path, sources: list[Source], shards: list[Shard], spec: ShardSpec
) -> list[str]:
    """Encode the shards that are not done yet, with a progress bar; returns the SHA-256 of each source."""
    todo = {index: shard for index, shard in enumerate(shards) if not report_path(spec.work, index).exists()}
    sizes = [sum(piece.bytes for piece in shard) for shard in shards]
    total, left = sum(sizes), sum(sizes[index] for index in todo)
    publish.check_space(output, sources, left / max(total, 1))
    if len(todo) < len(shards):
        log.info("continuing: %d of %d shards are done", len(shards) - len(todo), len(shards))
    with show_progress(total, done=total - left) as advance:
        return run_shards(todo, sources, spec, request.workers or len(os.sched_getaffinity(0)), advance)


def _find_empty_split(reports: list[ShardReport], request: PrepareRequest, sources: list[Source]) -> UserError | None:
    """The error for a corpus without documents, or without documents in some split."""
    records = any(source.format not in ("txt", "html") for source in sources)  # with a field each
    counts = {name: sum(report.documents[name] for report in reports) for name in SPLITS}
    empty = sum(report.empty_documents for report in reports)
    skipped = sum(report.lines_skipped for report in reports)
    total = sum(counts.values())
    if not total:
        return UserError(
            "the corpus is empty",
            expected="at least one document with text",
            found=f"{empty} empty and {skipped} skipped records in {', '.join(map(str, request.inputs))}",
            do=f"check --field (now {request.field!r}) and the inputs" if records else "check the inputs",
        )
    without = [name for name in SPLITS if not counts[name]]
    if without:
        return UserError(
            f"no document fell into {' and '.join(without)}",
            expected="at least one document in each split",
            found=f"{total} documents in all, shares {', '.join(f'{share:.2%}' for share in request.shares)}",
            do="--txt-unit paragraph, which makes each paragraph a document, or add text"
            if request.txt_unit == "file" and any(source.format == "txt" for source in sources)
            else f"add documents: {total} are too few to train, to validate and to test",
        )
    return None


def _make_manifest(
    request: PrepareRequest,
    output: Path,
    sources: list[Source],
    hashes: list[str],
    facts: TokenizerFacts,
    spec: ShardSpec,
    reports: list[ShardReport],
    splits: dict[str, SplitFacts],
) -> Manifest:
    counts = [report.encoding for report in reports]
    batches, redone = sum(c.batches for c in counts), sum(c.batches_redone for c in counts)
    path = "hf" if spec.encoder.backend == "hf" or redone == batches else "mixed" if redone else "gigatoken"
    return Manifest(
        name=output.name,
        created_by=publish.library_versions(),
        settings=request.settings(),
        seed=request.seed,
        shares=dict(zip(SPLITS, spec.shares, strict=True)),
        text_field=request.field,
        dedup="exact" if request.dedup else "off",
        dtype=spec.dtype,
        lines_skipped=sum(report.lines_skipped for report in reports),
        empty_documents=sum(report.empty_documents for report in reports),
        special_text_documents=sum(c.special_text_documents for c in counts),
        encoding=EncodingFacts(
            path,
            documents_checked=sum(c.documents_checked for c in counts),
            documents_by_hf=sum(c.documents_by_hf for c in counts),
            batches=batches,
            batches_redone=redone,
        ),
        tokenizer=facts,
        splits=splits,
        sources=[SourceFacts(s.path, s.bytes, sha) for s, sha in zip(sources, hashes, strict=True)],
    )


def _log_summary(manifest: Manifest) -> None:
    for name, split in manifest.splits.items():
        megabytes = split.text_bytes / 1e6
        line = f"{name:>10}: {split.documents:>12,} documents {split.tokens:>15,} tokens {megabytes:>10,.2f} MB"
        if split.duplicates_dropped:
            line += f"  ({split.duplicates_dropped:,} duplicates dropped)"
        log.info("%s", line)
    notes = {
        "records skipped": manifest.lines_skipped,
        "empty documents left out": manifest.empty_documents,
        f"documents that spell a special token ({manifest.settings['special_text']})": manifest.special_text_documents,
        "batches encoded again with the HF tokenizer, because gigatoken differed": manifest.encoding.batches_redone,
    }
    for note, count in notes.items():
        if count:
            log.info("%10s %s", f"{count:,}", note)
    encoding = manifest.encoding
    log.info("ids by %s, %s documents checked against HF", encoding.path, f"{encoding.documents_checked:,}")
