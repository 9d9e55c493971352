"""The tasks that need no download: what an item is, that it is the same every time, and text that cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.errors import UserError
from common.rundir import RunDir
from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.tokenizer import load_tokenizer
from report.evaluation.held_out_text import default_domains, name_texts, read_domains, warn_of_training_text
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
    folder, names = build_tasks({"mine": DOCUMENTS}, cache=tmp_path)
    assert names == ["cloze_mine", "next_line_mine", "bits_mine"]
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    assert {path.name for path in before} == {"cloze_mine.jsonl", "next_line_mine.jsonl", "bits_mine.jsonl"}
    assert build_tasks({"mine": DOCUMENTS}, cache=tmp_path) == (folder, names)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    config = yaml.safe_load((folder / "cloze_mine.yaml").read_text())
    assert Path(config["dataset_kwargs"]["data_files"]["test"]) == folder / "cloze_mine.jsonl"
    assert build_tasks({"mine": DOCUMENTS[1:]}, cache=tmp_path)[0] != folder


ONE_LINE = [" ".join(WORDS[(seed * 5 + place * 7) % 12] for place in range(30)) for seed in range(50)]  # a web page
JAPANESE = ["\u5ddd\u306e\u77f3\u306f\u51ac\u306b\u767d\u304f\u306a\u308a\u307e\u3059\u3002" * 5] * 50


@pytest.mark.parametrize(
    ("documents", "made"),
    [
        (ONE_LINE, {"cloze": 50, "bits": 50}),
        ([text[:150] for text in ONE_LINE], {"cloze": 50, "bits": 50}),
        (JAPANESE, {"cloze": 50, "bits": 50}),
        (["\u0e41\u0e21\u0e48\u0e19\u0e49\u0e33 " * 50] * 40, {"bits": 40}),  # Thai: its words have no borders
        ([document(1, 300)], {"cloze": 30, "bits": 10}),  # a book in one file: there are no lines of others
    ],
)
def test_what_a_text_gives_no_items_for_is_left_out(
    documents: list[str], made: dict[str, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, names = build_tasks({"x": documents}, cache=tmp_path)
    items = {name: (folder / f"{name}.jsonl").read_text().count("\n") for name in names}
    assert items == {f"{family}_x": number for family, number in made.items()}
    left_out = {"cloze", "next_line", "bits"} - made.keys()
    warned = [record.getMessage() for record in caplog.records]
    assert {line.split("_x ")[0] for line in warned if "is left out" in line} == left_out
    assert {line.split("_x:")[0] for line in warned if "a verdict needs 30" in line} == {
        family for family, number in made.items() if number < 30
    }
    with pytest.raises(UserError, match="no item for next_line_x"):
        build_tasks({"x": documents}, ["next_line"], tmp_path, required=True)


def test_text_is_read_from_held_out_splits_and_files(tmp_path: Path, sample: Path) -> None:
    (tmp_path / "my text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    found = read_domains(name_texts([str(tmp_path / "my text.jsonl"), str(sample / "prose")]))
    assert found["my_text"] == DOCUMENTS and 20 < len(found["prose"]) < 60
    raw = (sample / "raw" / "prose.jsonl").read_text().splitlines()
    assert set(found["prose"]) < {json.loads(line)["text"] for line in raw}


def _write_run(folder: Path, corpora: dict[str, Path]) -> RunDir:
    """A run with a blend of these corpora, by the names of the domains."""
    run = RunDir.at(folder / "runs" / "mine")
    run.path.mkdir(parents=True)
    manifests = {str(path): json.loads((path / "manifest.json").read_text()) for path in corpora.values()}
    run.data.write_text(json.dumps(manifests))
    domains = [{"name": name, "folder": str(path)} for name, path in corpora.items()]
    run.blend.write_text(json.dumps({"domains": domains}))
    return run


def test_corpora_of_a_run_have_the_names_of_its_blend(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two may be folders of the same name. Those that are gone are not replaced by the sample corpora."""
    monkeypatch.chdir(tmp_path)
    folders = {"old": tmp_path / "a" / "text", "new": tmp_path / "b" / "text"}
    for path in folders.values():
        shutil.copytree(sample / "prose", path)
    shutil.copytree(sample / "prose", "corpora/sample/prose")
    run = _write_run(tmp_path, folders)
    assert default_domains(run) == {name: str(path) for name, path in folders.items()}
    shutil.rmtree(folders["old"])
    assert default_domains(run) == {"new": str(folders["new"])}
    assert f"without the corpora {folders['old']}" in caplog.text
    shutil.rmtree(folders["new"])
    with pytest.raises(UserError, match="the corpora of the run mine are not here"):
        default_domains(run)
    assert default_domains(None) == {"prose": "corpora/sample/prose"}


def test_text_that_the_run_was_trained_on(tmp_path: Path, sample: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = _write_run(tmp_path, {"prose": sample / "prose"})
    raw = sample / "raw" / "prose.jsonl"
    (tmp_path / "other.jsonl").write_bytes(raw.read_bytes()[::-1])  # as long
    warn_of_training_text([str(sample / "prose"), str(tmp_path / "other.jsonl")], run)
    assert not caplog.records
    warn_of_training_text([str(raw)], run)
    assert f"the run's corpus {sample / 'prose'} was made from {raw.resolve()}" in caplog.text


@pytest.mark.nemo
def test_chats_keep_their_control_tokens(tmp_path: Path, sample: Path) -> None:
    tokenizer = load_tokenizer(sample / "prose" / "tokenizer")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    messages = [
        [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": "yes"}] for n in range(9)
    ]
    source = tmp_path / "chat.jsonl"
    source.write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    words: dict[str, Any] = {
        "tokenizer": str(tmp_path / "tokenizer"),
        "field": "messages",
        "chat": True,
        "split": "40,30,30",
    }
    prepare_corpus(PrepareRequest(inputs=[str(source)], output=tmp_path / "chats", workers=1, **words))
    for text in read_domains({"chats": str(tmp_path / "chats")})["chats"]:
        assert text.startswith("user: question ") and text.endswith("<|endoftext|>assistant: yes<|endoftext|>")


def test_text_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no text to make the tasks from"):
        default_domains(None)
    with pytest.raises(UserError, match="no input file matches"):
        read_domains({"nowhere": "nowhere"})
    with pytest.raises(UserError, match="two texts are named"):
        name_texts(["x.txt", "a/x.txt"])
    Path("x.txt").write_text("short")
    with pytest.raises(UserError, match="no item for cloze_x"):
        build_tasks(read_domains({"x": "x.txt"}), ["cloze", "next_line"], tmp_path / "cache", required=True)
