"""Tasks that need no download: three for each domain, made from held-out text as the harness's YAML and JSON files.

- cloze_DOMAIN: predict the last word of a passage (as LAMBADA, arXiv 1606.06031): accuracy, and nats per word.
- next_line_DOMAIN: which of four lines comes next? Three are from other documents of the domain: accuracy.
- bits_DOMAIN: bits per byte of the text.

All three compare likelihoods, which move at sizes where knowledge tests such as MMLU stay at chance. The same text
gives the same items. `lm_eval --include_path FOLDER` reads the folder too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_atomic
from report.evaluation.comparison import FEWEST_ITEMS

log = logging.getLogger("launch")
CACHE = Path("corpora/evaluation")
FAMILIES = ("cloze", "next_line", "bits")
ITEMS = 200  # of each task at most; with 200 the standard error of an accuracy is at most 3.5 points
PASSAGE = 600  # characters of context at most
LEAST_CONTEXT = 40  # characters
TEXT = 2000  # characters of an item of bits_DOMAIN: logits of 500 tokens x 151,936 ids are 0.3 GB
CHOICES = 4
_FORMAT = 2  # part of the cache's key: items are made anew when this file changes what it makes
_CHINESE_JAPANESE = r"\u3041-\u30ff\u3400-\u9fff"
_THAI_LAO_BURMESE_KHMER = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # no spaces between words, and no such marks
# a word of four letters after a space, or two characters before a Chinese or Japanese mark
_TARGET = re.compile(
    rf" [^\W\d_{_CHINESE_JAPANESE}{_THAI_LAO_BURMESE_KHMER}]{{4,}}\b"
    rf"|[{_CHINESE_JAPANESE}]{{2}}(?=[\u3001\u3002\uff01\uff1f\uff0c])"
)
_METRICS = {
    "cloze": [("perplexity", "perplexity", False), ("acc", "mean", True)],
    "next_line": [("acc", "mean", True), ("acc_norm", "mean", True)],
    "bits": [("bits_per_byte", "bits_per_byte", False)],
}
_OUTPUT = {"cloze": "loglikelihood", "next_line": "multiple_choice", "bits": "loglikelihood_rolling"}
Item = dict[str, Any]


def build_tasks(
    domains: dict[str, list[str]], families: Sequence[str] = FAMILIES, cache: Path = CACHE, *, required: bool = False
) -> tuple[Path, list[str]]:
    """Write the tasks of each domain, once for each text. What gives no item is left out, with a warning.

    Args:
        domains: domain -> documents.
        families: of `FAMILIES`.
        cache: the folder of such folders.
        required: leave nothing out: the user has named these families.

    Returns:
        the folder, which holds FAMILY_DOMAIN.yaml and FAMILY_DOMAIN.jsonl, and the names FAMILY_DOMAIN.

    Raises:
        UserError: a text that gives no item of any family, or of one that is `required`.
    """
    text = json.dumps([_FORMAT, sorted(families), domains], ensure_ascii=False, sort_keys=True)
    folder = cache / hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    names = []
    for domain, documents in domains.items():
        for family in families:
            items = _write_task(folder, family, domain, documents)
            if items:
                names.append(f"{family}_{domain}")
            elif required:
                raise _too_short(f"{family}_{domain}", documents)
            else:
                log.warning("%s_%s is left out: the text gives no item (%s)", family, domain, _NEEDS[family])
            if 0 < items < FEWEST_ITEMS:
                log.warning(
                    "%s_%s: %d items, and a verdict needs %d: give more text", family, domain, items, FEWEST_ITEMS
                )
    if not names:
        raise _too_short(" and ".join(families), [one for documents in domains.values() for one in documents])
    return folder, names


def _write_task(folder: Path, family: str, domain: str, documents: Sequence[str]) -> int:
    """Write one task, unless its items are there; returns their number."""
    make = {"cloze": make_cloze, "next_line": make_next_line, "bits": make_bits}
    task, data = f"{family}_{domain}", folder / f"{family}_{domain}.jsonl"
    if data.is_file():
        number = data.read_bytes().count(b"\n")
    else:
        items = list(make[family](documents))
        if not items:
            return 0
        write_atomic(data, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))
        number = len(items)
    write_atomic(folder / f"{task}.yaml", _yaml(task, family, data.absolute()))  # names an absolute path
    return number


def _yaml(task: str, family: str, data: Path) -> str:
    """The harness's task configuration. JSON is YAML. The doc_to_ fields name columns of the data file."""
    columns = {
        "cloze": {"doc_to_text": "context", "doc_to_target": "target"},
        "next_line": {"doc_to_text": "context", "doc_to_target": "label", "doc_to_choice": "choices"},
        "bits": {"doc_to_text": "", "doc_to_target": "text"},
    }
    config = {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": _OUTPUT[family],
        **columns[family],
        "target_delimiter": "",
        "metric_list": [
            {"metric": metric, "aggregation": aggregation, "higher_is_better": higher}
            for metric, aggregation, higher in _METRICS[family]
        ],
        "metadata": {"version": float(_FORMAT)},
    }
    return json.dumps(config, indent=1, ensure_ascii=False) + "\n"


def make_cloze(documents: Sequence[str]) -> Iterator[Item]:
    """Passages that end before a word, one for each stretch of `PASSAGE` characters, over all documents in turn."""
    return _in_turn([_cloze_of(document) for document in documents])


def _cloze_of(document: str) -> Iterator[Item]:
    """A document of less than half a passage is one passage."""
    context = max(LEAST_CONTEXT, min(PASSAGE // 4, len(document) // 2))
    for start in range(0, max(1, len(document) - PASSAGE // 2), PASSAGE):
        passage = document[start : start + PASSAGE + 40]  # a word that is cut off at its end is not taken
        targets = [match for match in _TARGET.finditer(passage) if match.start() >= context and match.end() <= PASSAGE]
        if targets and passage[: targets[-1].start()].strip():
            yield {"context": passage[: targets[-1].start()], "target": targets[-1].group()}


def make_next_line(documents: Sequence[str]) -> Iterator[Item]:
    """Lines with what stands before them, beside three lines of like length from other documents."""
    rng = random.Random(0)
    lines = [_long_lines(document) for document in documents]
    pool = [(number, line) for number, found in enumerate(lines) for _, line in found]
    return _in_turn(
        [_next_lines_of(number, documents[number], lines[number], pool, rng) for number in range(len(lines))]
    )


def _next_lines_of(
    number: int, document: str, lines: list[tuple[int, str]], pool: list[tuple[int, str]], rng: random.Random
) -> Iterator[Item]:
    for start, line in lines[1::3]:
        others = {other for owner, other in rng.sample(pool, min(len(pool), 60)) if owner != number and other != line}
        nearest = sorted(others, key=lambda other: (abs(len(other) - len(line)), other))[: CHOICES - 1]
        context = document[max(0, start - PASSAGE) : start]
        if len(nearest) == CHOICES - 1 and context.strip():
            label = rng.randrange(CHOICES)
            yield {"context": context, "choices": [*nearest[:label], line, *nearest[label:]], "label": label}


def _long_lines(document: str) -> list[tuple[int, str]]:
    """(start, line) of the lines of 20 to 200 characters, indentation included."""
    found = re.finditer(r"^.{20,200}$", document, re.M)
    return [(match.start(), match.group()) for match in found if match.group().strip()]


def make_bits(documents: Sequence[str]) -> Iterator[Item]:
    """Stretches of `TEXT` characters, over all documents in turn."""
    return _in_turn([_stretches_of(document) for document in documents])


def _stretches_of(document: str) -> Iterator[Item]:
    for start in range(0, len(document), TEXT):
        if (text := document[start : start + TEXT]).strip():
            yield {"text": text}


def _in_turn(streams: list[Iterator[Item]]) -> Iterator[Item]:
    """One item of each document, then the second of each, until there are `ITEMS`."""
    left = ITEMS
    while streams and left:
        alive = []
        for stream in streams:
            item = next(stream, None)
            if item is not None and left:
                alive.append(stream)
                left -= 1
                yield item
        streams = alive


_NEEDS = {
    "cloze": f"words after spaces, or Chinese or Japanese sentences, after {LEAST_CONTEXT} characters or more",
    "next_line": f"{CHOICES} documents in lines of 20 to 200 characters",
    "bits": "visible text",
}


def _too_short(task: str, documents: Sequence[str]) -> UserError:
    needs = _NEEDS.get(next((family for family in FAMILIES if task.startswith(family)), ""), _NEEDS["bits"])
    return UserError(
        f"the text gives no item for {task}",
        expected=needs,
        found=f"{len(documents)} documents, {sum(map(len, documents)):,} characters",
        do="give more text with --text, or name the other tasks with --tasks",
    )
