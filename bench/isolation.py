"""What isolated documents (`data.isolate_documents`) cost in speed, and what they change in the loss.

    python -m bench.isolation speed [--recipe qwen25_500m_single] [--lengths 2048 512] [--rounds 2] [path=value ...]
    python -m bench.isolation losses [--recipe qwen25_tiny] [--seeds 1234 1 2] [--steps 300] [path=value ...]

`speed` cuts the text of the corpus in `--corpus` (a prepared folder) into documents whose lengths are exponentially
distributed around each of `--lengths` tokens, and trains on them with and without isolation, in turns, each in a
process of its own. It prints unmasked tokens per second: with isolation a document's first token is not in the loss.
`losses` trains on the prose of the sample corpus in documents of a few paragraphs, with and without isolation, once
for each seed of the sample order. It measures both models in both ways on the same tokens of the validation split: with
each document by itself, and with packed documents that attend to each other.
Its tables are in docs/measurements/isolated-documents.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.turns import measure_in_turns

_TEXT_TOKENS = 4_000_000  # of the corpus whose text is cut; it is repeated if the run needs more

_LEAST_CHARACTERS = 300  # of a document of `losses`


def main() -> None:
    """Measure what the first word asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "losses"])
    parser.add_argument("--recipe", help="default: qwen25_500m_single for speed, qwen25_tiny for losses")
    parser.add_argument("--corpus", type=Path, default=Path("corpora/mine"), help="whose text `speed` cuts")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 512], help="mean tokens of a document")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--steps", type=int, help="timed steps (default 20), or training steps (default 300)")
    parser.add_argument("overrides", nargs="*", help="path=value")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure_speed(args, Path(folder)) if args.what == "speed" else measure_losses(args, Path(folder))
    print("\n".join(lines))


def measure_speed(args: argparse.Namespace, folder: Path) -> list[str]:
    """The table of tokens per second as lines of Markdown."""
    corpora = {length: cut_documents(args.corpus, folder / f"documents-{length}", length) for length in args.lengths}
    run = ["bench.throughput", "--recipe", args.recipe or "qwen25_500m_single", "--steps", str(args.steps or 20)]
    ways = [(length, isolate) for length in corpora for _ in range(args.rounds) for isolate in (False, True)]
    commands = [
        [*run, f"data.paths={folder}/documents-{length}", f"data.isolate_documents={isolate}", *args.overrides]
        for length, isolate in ways
    ]
    rates: dict[tuple[int, bool], list[float]] = {}
    for way, result in zip(ways, measure_in_turns(commands, sys.stderr), strict=True):
        print(json.dumps({"length": way[0], "isolated": way[1], **result}), file=sys.stderr, flush=True)
        if "error" in result:
            return [f"a run failed: {result['error']}"]
        rates.setdefault(way, []).append(result["tokens_per_second"])
    lines = ["| mean tokens per document | unmasked tokens per second | isolated | ratio |", "|---|---|---|---|"]
    for length, mean in corpora.items():
        together, apart = (statistics.median(rates[length, isolate]) for isolate in (False, True))
        lines.append(f"| {mean:.0f} | {together:,.0f} | {apart:,.0f} | {apart / together:.3f} |")
    return lines


def cut_documents(corpus: Path, folder: Path, length: int) -> float:
    """Prepare the text of `corpus` in documents of about `length` tokens; returns the mean tokens of its documents."""
    import numpy
    from transformers import AutoTokenizer

    from data.manifest import load_manifest

    manifest = load_manifest(corpus)
    ids = numpy.memmap(corpus / "train.bin", dtype=manifest.dtype, mode="r")[:_TEXT_TOKENS]
    tokenizer, draw, at = AutoTokenizer.from_pretrained(str(corpus / "tokenizer")), random.Random(length), 0

    def texts() -> Iterator[str]:
        nonlocal at
        while at < len(ids):
            size = max(2, round(draw.expovariate(1 / length)))
            part = ids[at : at + size]
            at += size
            yield str(tokenizer.decode(part[part != manifest.tokenizer.eod_id].tolist()))

    _prepare(texts(), folder, str(corpus / "tokenizer"))
    found = load_manifest(folder).splits["train"]
    return found.tokens / found.documents


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs of the text, joined until they have `_LEAST_CHARACTERS`."""
    joined = ""
    for paragraph in text.split("\n\n"):
        joined += paragraph + "\n\n"
        if len(joined) >= _LEAST_CHARACTERS:
            yield joined
            joined = ""
    yield joined


def _prepare(texts: Iterator[str], folder: Path, tokenizer: str) -> None:
    from data.prepare.prepare import prepare_corpus
    from data.prepare.request import PrepareRequest

    source = folder.with_suffix(".jsonl")
    with source.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts if text.strip())
    prepare_corpus(PrepareRequest(inputs=[str(source)], output=folder, tokenizer=tokenizer, split="90,5,5"))


def measure_losses(args: argparse.Namespace, folder: Path) -> list[str]:
    """The table of validation losses as lines of Markdown."""
    from data.manifest import load_manifest
    from data.sample import build_sample

    sample = Path("corpora/sample")
    build_sample(sample)
    texts = (json.loads(line)["text"] for line in (sample / "raw/prose.jsonl").read_text().splitlines())
    _prepare((part for text in texts for part in _paragraphs(text)), folder / "paragraphs", str(sample / "tokenizer"))
    train = load_manifest(folder / "paragraphs").splits["train"]
    run = ["bench.isolation_run", "--recipe", args.recipe or "qwen25_tiny", "--steps", str(args.steps or 300)]
    ways = [(isolate, seed) for seed in args.seeds for isolate in (False, True)]
    commands = [
        [*run, f"data.paths={folder}/paragraphs", f"data.isolate_documents={isolate}", f"data.seed={seed}"]
        + args.overrides
        for isolate, seed in ways
    ]
    found: dict[tuple[bool, str], list[float]] = {}
    for (isolate, seed), result in zip(ways, measure_in_turns(commands, sys.stderr, at_once=1), strict=True):
        print(json.dumps({"isolated": isolate, "seed": seed, **result}), file=sys.stderr, flush=True)
        if "error" in result:
            return [f"a run failed: {result['error']}"]
        for way in ("apart", "together"):
            found.setdefault((isolate, way), []).append(result[way])
    seeds = " | ".join(f"seed {seed}" for seed in args.seeds)
    lines = [
        f"{train.documents:,} documents of {train.tokens / train.documents:.0f} tokens on average",
        f"| trained | validated | {seeds} | mean |",
        "|---|---|" + "---|" * (len(args.seeds) + 1),
    ]
    for (isolate, way), losses in found.items():
        row = ["isolated" if isolate else "together", {"apart": "isolated"}.get(way, way)]
        row += [f"{loss:.4f}" for loss in losses] + [f"{statistics.mean(losses):.4f}"]
        lines.append("| " + " | ".join(row) + " |")
    return lines


if __name__ == "__main__":
    main()
