"""Own text as people have it: other suffixes, other files beside it, and few documents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import UserError
from data.manifest import SPLITS, Manifest
from data.prepare import small_corpus
from data.prepare.html_text import extract_text
from data.prepare.prepare import prepare_corpus
from data.prepare.request import PrepareRequest
from data.prepare.small_corpus import Moves, save_moves
from tests.data.corpora import make_texts, write_jsonl

Ask = Callable[..., PrepareRequest]


def _tokens(manifest: Manifest) -> list[int]:
    return [manifest.splits[name].tokens for name in SPLITS]


@pytest.mark.parametrize("count", (3, 4, 20, 100))
def test_few_documents_fill_every_split_at_the_first_try(
    count: int, ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the default shares; each split has a document, and validation and test about their share of the tokens."""
    texts = make_texts(count)
    with caplog.at_level(logging.INFO):
        found = prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", texts), split="98,1,1"))
    documents = [found.splits[name].documents for name in SPLITS]
    assert sum(documents) == count and min(documents) >= 1
    assert "from train, because few documents" in caplog.text
    train, validation, test = _tokens(found)
    if count >= 20:
        assert train > 0.85 * sum(_tokens(found)) and min(validation, test) >= 0.005 * sum(_tokens(found))


def test_one_long_document_stays_in_train(ask: Ask, tmp_path: Path) -> None:
    texts = make_texts(12)
    found = prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", [*texts, " ".join(texts * 20)]), split="80,10,10"))
    assert _tokens(found)[0] > 0.8 * sum(_tokens(found))


def test_an_interrupted_second_encoding_gives_the_same_bytes(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(30))
    whole = prepare_corpus(ask(source, split="98,1,1"))
    interrupted = ask(source, split="98,1,1", output=tmp_path / "again")

    class Killed(Exception):
        pass

    def save_and_die(partial: Path, moves: Moves) -> None:
        save_moves(partial, moves)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(small_corpus, "save_moves", save_and_die)
        with pytest.raises(Killed):
            prepare_corpus(interrupted)
    assert prepare_corpus(interrupted).splits == whole.splits


def test_many_documents_keep_the_split_of_their_hash(
    ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", make_texts(300))))
    assert "from train" not in caplog.text


def test_two_documents_are_refused_with_advice_for_their_format(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no document fell into") as error:
        prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", make_texts(2))))
    assert error.value.do.startswith("add documents: 2 are too few")
    (tmp_path / "book.txt").write_text("\n\n".join(make_texts(30)))
    with pytest.raises(UserError, match="no document fell into") as error:
        prepare_corpus(ask(tmp_path / "book.txt", output=tmp_path / "book"))
    assert error.value.do.startswith("--txt-unit paragraph")
    assert min(_tokens(prepare_corpus(ask(tmp_path / "book.txt", output=tmp_path / "book", txt_unit="paragraph")))) > 0


def test_a_folder_of_notes_code_and_pictures(ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for number, text in enumerate(make_texts(8)):
        (folder / f"note-{number}{('.md', '.rst', '.text', '.html')[number % 4]}").write_text(text)
    (folder / "tool.py").write_text("print('a tool of mine')\n" * 9)
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    with caplog.at_level(logging.WARNING):
        found = prepare_corpus(ask(folder))
    assert sum(split.documents for split in found.splits.values()) == 8
    assert "2 file(s) of other kinds (1 .jpg, 1 .py)" in caplog.text and "--as-text .py" in caplog.text
    with_code = prepare_corpus(ask(folder, output=tmp_path / "code", as_text="py"))
    assert sum(split.documents for split in with_code.splits.values()) == 9
    with pytest.raises(UserError, match="unknown kind of file") as error:
        prepare_corpus(ask(folder / "tool.py", output=tmp_path / "one"))
    assert error.value.do.startswith("--as-text .py")


def test_the_text_of_a_page() -> None:
    page = (
        "<html><head><title>Rivers</title><style>p {color: red}</style><script>var a = '<p>';</script></head><body>"
        "<h1>The&nbsp;river</h1><p>It is\n  <b>long</b> &amp; wide.</p><ul><li>one<li>two</ul><pre>  a\n    b</pre>"
    )
    assert extract_text(page) == "Rivers\n\nThe river\n\nIt is long & wide.\n\none\ntwo\n\n  a\n    b"
