"""The tasks that need no download: what an item is, that it is the same every time, and text that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from common.errors import UserError
from report.evaluation.held_out_text import default_text, read_domains
from report.evaluation.local_tasks import CHOICES, ITEMS, build_tasks, make_bits, make_cloze, make_next_line

WORDS = [
    "river",
    "stone",
    "winter",
    "paper",
    "orange",
    "candle",
    "silver",
    "garden",
    "morning",
    "yellow",
    "window",
    "letter",
]


def document(seed: int, lines: int = 60) -> str:
    """Lines of eight words, no two alike."""
    return "\n".join(
        " ".join(WORDS[(seed * 7 + line * 5 + place * (1 + line % 11)) % 12] for place in range(8)) + f" {seed}-{line}"
        for line in range(lines)
    )


DOCUMENTS = [document(seed) for seed in range(6)]


def test_cloze_asks_for_the_word_after_the_passage() -> None:
    items = list(make_cloze(DOCUMENTS))
    assert len(items) > 30
    for item in items:
        assert item["target"][0] == " " and item["target"][1:] in WORDS
        assert any(item["context"] + item["target"] in text for text in DOCUMENTS)
    chinese = "模型在新的语料上继续训练，而不忘记旧的知识。" * 40
    item = next(make_cloze([chinese]))
    assert len(item["target"]) == 2 and chinese.startswith(item["context"] + item["target"])


def test_next_line_has_one_line_of_the_document_and_three_of_others() -> None:
    items = list(make_next_line(DOCUMENTS))
    assert len(items) > 30 and {item["label"] for item in items} == set(range(CHOICES))
    for item in items:
        (owner,) = [text for text in DOCUMENTS if item["context"] + item["choices"][item["label"]] in text]
        assert len(item["choices"]) == CHOICES
        assert sum(f"\n{choice}\n" in f"\n{owner}\n" for choice in item["choices"]) == 1


def test_bits_cover_the_text_in_turn_up_to_the_limit() -> None:
    assert "".join(item["text"] for item in make_bits(DOCUMENTS[:1])) == DOCUMENTS[0]
    items = list(make_bits([document(seed, 400) for seed in range(30)]))
    assert len(items) == ITEMS and len({item["text"].split()[8].split("-")[0] for item in items[:30]}) == 30


def test_the_same_text_gives_the_same_files_once(tmp_path: Path) -> None:
    folder = build_tasks({"mine": DOCUMENTS}, cache=tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    assert {path.name for path in before} == {"cloze_mine.jsonl", "next_line_mine.jsonl", "bits_mine.jsonl"}
    assert build_tasks({"mine": DOCUMENTS}, cache=tmp_path) == folder
    assert {path: path.stat().st_mtime_ns for path in before} == before
    config = yaml.safe_load((folder / "cloze_mine.yaml").read_text())
    assert Path(config["dataset_kwargs"]["data_files"]["test"]) == folder / "cloze_mine.jsonl"
    assert build_tasks({"mine": DOCUMENTS[1:]}, cache=tmp_path) != folder


def test_text_is_read_from_held_out_splits_and_files(tmp_path: Path, sample: Path) -> None:
    (tmp_path / "my text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    found = read_domains([str(tmp_path / "my text.jsonl"), str(sample / "prose")])
    assert found["my_text"] == DOCUMENTS and 20 < len(found["prose"]) < 60
    raw = (sample / "raw" / "prose.jsonl").read_text().splitlines()
    assert set(found["prose"]) < {json.loads(line)["text"] for line in raw}


def test_text_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no text to make the tasks from"):
        default_text(None)
    with pytest.raises(UserError, match="no input file matches"):
        read_domains(["nowhere"])
    (tmp_path / "a").mkdir()
    for name in ("x.txt", "a/x.txt"):
        (tmp_path / name).write_text("short")
    with pytest.raises(UserError, match="two texts are named"):
        read_domains(["x.txt", "a/x.txt"])
    with pytest.raises(UserError, match="too short for the task cloze_x"):
        build_tasks(read_domains(["x.txt"]), cache=tmp_path / "cache")
