"""Measure `data prepare` beside Megatron's own preprocessing, on the same text, tokenizer and workers.

The baseline does what tools/preprocess_data.py does: a pool of processes, one JSON line per task, one call of
the HF tokenizer per document, the ids pickled back to a single writer with IndexedDatasetBuilder. Both read the
same JSONL file and write .bin and .idx, each run in a fresh process. `ratio` compares the whole runs. Imports and
process start are measured on a 1 MB head of the text; `ratio_steady` leaves them out, as for a corpus of gigabytes.

    python -m bench.data_prepare --megabytes 64 --workers 2

Prints one JSON object: MB of text per second and worker for each, their ratio, and whether the ids are equal.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.sample import as_qwen2_tokenizer, byte_level_bpe

VOCAB_SIZE = 32_000
DOCUMENT_CHARACTERS = 3_000
SEED_FOLDERS = (Path(os.__file__).parent,)
_pool: dict[str, Any] = {}


def make_text(path: Path, megabytes: float, folders: tuple[Path, ...] = SEED_FOLDERS) -> int:
    """Write a JSONL file of distinct documents from Python source files; returns the bytes of text in it."""
    size = 0
    seen: set[bytes] = set()
    with path.open("w", encoding="utf-8") as file:
        for text in _documents(folders):
            raw = text.encode("utf-8", "replace")
            digest = hashlib.blake2b(raw, digest_size=16).digest()
            if digest in seen or text.isspace():
                continue
            seen.add(digest)
            file.write(json.dumps({"text": raw.decode("utf-8")}) + "\n")
            size += len(raw)
            if size >= megabytes * 1e6:
                break
    return size


def make_tokenizer(folder: Path, text: Path) -> None:
    """Train a Qwen2-like tokenizer on the head of the text and save it as a fast tokenizer."""
    from tokenizers import pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 1, initial_alphabet=alphabet, show_progress=False)
    model = byte_level_bpe()
    with text.open(encoding="utf-8") as file:
        model.train_from_iterator((json.loads(line)["text"] for line in itertools.islice(file, 4000)), trainer)
    as_qwen2_tokenizer(model).save_pretrained(str(folder))


def baseline(text: Path, tokenizer: Path, prefix: Path, workers: int) -> None:
    """Prepare the text as Megatron's tools/preprocess_data.py does."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker, (str(tokenizer),)) as pool, text.open(encoding="utf-8") as file:
        for ids in pool.imap(_encode_line, file, 32):
            builder.add_item(torch.IntTensor(ids))
            builder.end_document()
    builder.finalize(f"{prefix}.idx")


def ours(text: Path, tokenizer: Path, output: Path, workers: int) -> None:
    """Prepare the text with `data prepare`."""
    prepare_corpus(PrepareRequest(inputs=[str(text)], output=output, tokenizer=str(tokenizer), workers=workers))


def time_in_new_process(function: Callable[[Path, Path, Path, int], None], *args: Path | int) -> float:
    """Seconds of a call in a new interpreter, its start included."""
    start = time.perf_counter()
    child = multiprocessing.get_context("spawn").Process(target=function, args=args)
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"{function.__name__} ended with {child.exitcode}")
    return time.perf_counter() - start


def same_documents(prefix: Path, output: Path) -> bool:
    """Whether both wrote the same documents; ours are spread over three splits."""
    from data.inspect import open_pair
    from data.manifest import SPLITS

    def hashes(path: Path) -> list[bytes]:
        pair, start, found = open_pair(path), 0, []
        for length in pair.lengths.tolist():
            found.append(hashlib.blake2b(pair.ids[start : start + length].tobytes(), digest_size=16).digest())
            start += length
        return found

    return sorted(hashes(prefix)) == sorted(sum((hashes(output / name) for name in SPLITS), []))


def main() -> None:
    """Run both and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="text to encode")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    folders = tuple(Path(entry) for entry in dict.fromkeys([*map(str, SEED_FOLDERS), *sys.path]) if entry)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        size = make_text(work / "all.jsonl", options.megabytes, folders)
        head = make_text(work / "head.jsonl", 1.0, folders)
        make_tokenizer(work / "tokenizer", work / "all.jsonl")
        result: dict[str, Any] = {"workers": options.workers, "text_MB": round(size / 1e6, 1)}
        rates: dict[str, float] = {}
        for name, function in {"ours": ours, "baseline": baseline}.items():
            start = time_in_new_process(
                function, work / "head.jsonl", work / "tokenizer", work / f"{name}-head", options.workers
            )
            whole = time_in_new_process(function, work / "all.jsonl", work / "tokenizer", work / name, options.workers)
            rates[name] = (size - head) / 1e6 / max(whole - start, 1e-3) / options.workers
            result[name] = {
                "seconds": round(whole, 2),
                "start_seconds": round(start, 2),
                "MB_per_s_per_worker": round(size / 1e6 / whole / options.workers, 2),
                "MB_per_s_per_worker_steady": round(rates[name], 2),
            }
        result["ratio"] = round(result["baseline"]["seconds"] / result["ours"]["seconds"], 1)
        result["ratio_steady"] = round(rates["ours"] / rates["baseline"], 1)
        result["same_ids"] = same_documents(work / "baseline", work / "ours")
    print(json.dumps(result, indent=2))


def _documents(folders: tuple[Path, ...]) -> Iterator[str]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from (text[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(text), DOCUMENT_CHARACTERS))


def _start_worker(tokenizer: str) -> None:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    _pool["tokenizer"] = AutoTokenizer.from_pretrained(tokenizer, use_fast=True, trust_remote_code=False)
    # read special tokens in the text as `data prepare` does
    _pool["tokenizer"].backend_tokenizer.encode_special_tokens = True
    _pool["eod"] = _pool["tokenizer"].eos_token_id


def _encode_line(line: str) -> list[int]:
    ids: list[int] = _pool["tokenizer"](json.loads(line)["text"], add_special_tokens=False).input_ids
    return [*ids, _pool["eod"]]


if __name__ == "__main__":
    main()
