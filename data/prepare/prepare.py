"""Text files to a prepared corpus: train, validation and test .bin/.idx, the tokenizer, and a manifest.

    inputs -> sources -> shards -> [workers] piece files -> merged splits -> published, manifest last

All work happens in OUTPUT/.partial. A run that was killed continues from the finished shards; what it gives is
byte-identical to an uninterrupted run, whatever the number of workers.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from data.console import progress, tell
from data.manifest import SPLITS, EncodingFacts, Manifest, SourceFacts, SplitFacts, TokenizerFacts
from data.prepare import publish
from data.prepare.encode import EncoderSpec, why_not_gigatoken
from data.prepare.input_files import Shard, Source
from data.prepare.merge import merge_split
from data.prepare.request import PrepareRequest
from data.prepare.shard import ShardReport, ShardSpec, marker
from data.prepare.sources import find_sources, plan_shards
from data.prepare.workers import run_shards
from data.tokenizer import backend_json, eod_id, fingerprint, load_tokenizer, special_tokens, vocab_size

if TYPE_CHECKING:
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

UINT16_BELOW = 65500  # Megatron's own border


def prepare_corpus(request: PrepareRequest) -> Manifest:
    """Prepare a corpus, continue an interrupted preparation, or return the one that is already there.

    Raises:
        UserError: anything about the inputs, the tokenizer, the output folder or the disk.
    """
    request.check()
    output = Path(request.output).expanduser().absolute()
    sources = find_sources(request.inputs, exclude=output)
    tokenizer = load_tokenizer(request.tokenizer)
    facts = tokenizer_facts(request.tokenizer, tokenizer)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with publish.locked(output):
            whole = publish.existing(output, request.settings(), sources, facts, request.overwrite)
            return whole or _build(request, output, sources, tokenizer, facts)
    except OSError as error:
        raise publish.explain(error, output, sources) from error


def tokenizer_facts(source: str, tokenizer: PreTrainedTokenizerFast) -> TokenizerFacts:
    """What the manifest says about a tokenizer."""
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
    partial = publish.open_partial(output, request.settings(), sources, facts, request.resume, request.overwrite)
    if publish.is_built(partial):
        return publish.publish(partial, output)
    spec = _shard_spec(request, partial / "shards", tokenizer, facts)
    try:
        shards = plan_shards(sources, request.txt_unit, request.shard_bytes)
        hashes = _run(request, output, sources, shards, spec)
    except UserError:
        publish.drop_if_useless(partial)
        raise
    reports = [ShardReport.load(marker(spec.work, index)) for index in range(len(shards))]
    if problem := _count_problem(reports, request):
        shutil.rmtree(partial)
        raise problem
    splits = {
        name: merge_split(spec.work, partial / "out", name, len(shards), request.dedup, spec.dtype) for name in SPLITS
    }
    tokenizer.save_pretrained(partial / "out" / "tokenizer")
    manifest = _manifest(request, output, sources, hashes, facts, spec, reports, splits)
    manifest.save(partial / "out")
    tell(_summary(manifest))
    return publish.publish(partial, output)


def _shard_spec(
    request: PrepareRequest, work: Path, tokenizer: PreTrainedTokenizerFast, facts: TokenizerFacts
) -> ShardSpec:
    encoder = EncoderSpec(
        tokenizer_json=backend_json(tokenizer),
        vocab_size=facts.vocab_size,
        special_tokens=tuple(special_tokens(tokenizer)),
        special_text=request.special_text,
        fast="hf",
    )
    why_not = "asked for" if request.encoder == "hf" else why_not_gigatoken(encoder)
    if why_not:
        tell(f"encoding with the HF tokenizer, about 1/10 of the speed ({why_not})")
    return ShardSpec(
        work=work,
        encoder=encoder if why_not else replace(encoder, fast="gigatoken"),
        dtype="uint16" if facts.vocab_size < UINT16_BELOW else "int32",
        eod_id=facts.eod_id,
        seed=request.seed,
        shares=tuple(request.settings()["split"]),
        field=request.field,
        txt_unit=request.txt_unit,
        on_error=request.on_error,
    )


def _run(
    request: PrepareRequest, output: Path, sources: list[Source], shards: list[Shard], spec: ShardSpec
) -> list[str]:
    """Do the shards that are not done yet, with a bar on standard error."""
    todo = {index: shard for index, shard in enumerate(shards) if not marker(spec.work, index).exists()}
    sizes = [sum(piece.bytes for piece in shard) for shard in shards]
    total, left = sum(sizes), sum(sizes[index] for index in todo)
    publish.check_space(output, sources, left / max(total, 1))
    if len(todo) < len(shards):
        tell(f"continuing: {len(shards) - len(todo)} of {len(shards)} shards are done")
    with progress(total, done=total - left) as tick:
        return run_shards(todo, sources, spec, request.workers or len(os.sched_getaffinity(0)), tick)


def _count_problem(reports: list[ShardReport], request: PrepareRequest) -> UserError | None:
    """What is wrong when there are no documents, or none in some split."""
    counts = {name: sum(report.documents[name] for report in reports) for name in SPLITS}
    empty = sum(report.empty_documents for report in reports)
    skipped = sum(report.lines_skipped for report in reports)
    total = sum(counts.values())
    if not total:
        return UserError(
            "the corpus is empty",
            expected="at least one document with text",
            found=f"{empty} empty and {skipped} skipped records in {', '.join(map(str, request.inputs))}",
            do=f"check the inputs and --field (now {request.field!r})",
        )
    bare = [name for name in SPLITS if not counts[name]]
    if bare:
        return UserError(
            f"no document fell into {' and '.join(bare)}",
            expected="at least one document in each split",
            found=f"{total} documents in all, shares {', '.join(f'{s:.2%}' for s in request.settings()['split'])}",
            do="give it a larger share (--split 80,10,10), use smaller documents (--txt-unit paragraph), or add data",
        )
    return None


def _manifest(
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
    path = "hf" if spec.encoder.fast == "hf" or redone == batches else "mixed" if redone else "gigatoken"
    return Manifest(
        name=output.name,
        created_by=publish.versions(),
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


def _summary(manifest: Manifest) -> str:
    lines = [
        f"{name:>10}: {split.documents:>12,} documents {split.tokens:>15,} tokens {split.text_bytes / 1e6:>10,.2f} MB"
        + (f"  ({split.duplicates_dropped:,} duplicates dropped)" if split.duplicates_dropped else "")
        for name, split in manifest.splits.items()
    ]
    notes = {
        "records skipped": manifest.lines_skipped,
        "empty documents left out": manifest.empty_documents,
        f"documents that spell a special token ({manifest.settings['special_text']})": manifest.special_text_documents,
        "batches redone with the HF tokenizer, gigatoken differed": manifest.encoding.batches_redone,
    }
    lines += [f"{count:>10,} {name}" for name, count in notes.items() if count]
    checked = manifest.encoding.documents_checked
    return "\n".join([*lines, f"ids by {manifest.encoding.path}, {checked:,} documents checked against HF"])
