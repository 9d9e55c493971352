"""Every input format gives the same documents, and bad input is named with its place."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from data.manifest import SPLITS
from data.prepare.prepare import prepare_corpus
from tests.data.corpora import FILES, documents, make_texts, write_jsonl

GOOD = [json.dumps({"text": text}).encode() for text in make_texts(300)]
BAD_LINES = {
    "broken JSON": (b'{"text": "cut', "a.jsonl:251: broken JSON"),
    "not UTF-8": (b'{"text": "caf\xe9"}', "a.jsonl:251: not UTF-8"),
    "missing field": (b'{"txt": "a", "id": 2}', r"a.jsonl:251: no field 'text'[\s\S]*did you mean 'txt'"),
    "number": (b'{"text": 5}', "a.jsonl:251: field 'text' is no text"),
    "array": (b'["a"]', "a.jsonl:251: a JSON list"),
    "repeated field": (b'{"text": "a", "x": {"text": "b"}, "text": "c"}', "a.jsonl:251: 2 fields 'text'"),
    "nested deeply": (b"[" * 100_000, "a.jsonl:251: JSON nested too deeply"),
    "surrogate": (b'{"text": "\\ud800"}', "a.jsonl:251: text that is no valid Unicode"),
}


def test_every_format_gives_the_same_documents(tmp_path: Path, ask: Any) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [f'{text}\nsecond line, "quoted"' for text in make_texts(300)]
    folder = tmp_path / "in"
    folder.mkdir()
    lines = write_jsonl(folder / "a.jsonl", texts).read_bytes()
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:0]) + gzip.compress(lines))
    with pyarrow.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as stream:
        stream.write(lines)
    table = pyarrow.table({"id": range(300), "text": texts})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=40)
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["id", "text"], *([number, text] for number, text in enumerate(texts))])
    (folder / "e.csv").write_bytes(b"\xef\xbb\xbf" + buffer.getvalue().encode())
    (folder / "f.txt").mkdir()
    for number, text in enumerate(texts):
        (folder / "f.txt" / f"{number:03d}.txt").write_text(text, newline="")
    (folder / "g.txt").write_text("\n \n\n".join(texts), newline="")
    wanted = None
    for path in sorted(folder.iterdir()):
        options = {"txt_unit": "paragraph"} if path.name == "g.txt" else {}
        prepare_corpus(ask(path, output=tmp_path / path.name, shard_bytes=10_000, **options))
        found = [(tmp_path / path.name / name).read_bytes() for name in FILES]
        wanted = wanted or found
        assert found == wanted, path.name
    prepare_corpus(ask(str(folder / "*.jsonl*"), output=tmp_path / "glob", dedup=True))
    assert [(tmp_path / "glob" / name).read_bytes() for name in FILES] == wanted


def test_ranges_of_a_line_file_lose_and_double_nothing(tmp_path: Path, ask: Any) -> None:
    texts = make_texts(60)
    path = tmp_path / "a.txt"
    path.write_text("\r\n".join(texts), newline="")
    for size in (101, 997, 10_000_000):
        output = tmp_path / str(size)
        prepare_corpus(ask(path, output=output, txt_unit="line", shard_bytes=size, split="1,1,1"))
        assert sorted(sum((documents(output, split) for split in SPLITS), [])) == sorted(texts)


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_stops_with_its_number_or_is_counted(tmp_path: Path, ask: Any, name: str) -> None:
    line, message = BAD_LINES[name]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([*GOOD[:250], line, *GOOD[250:]]))
    with pytest.raises(UserError, match=message):
        prepare_corpus(ask(path, shard_bytes=5_000))
    assert not (tmp_path / "out" / "manifest.json").exists()
    manifest = prepare_corpus(ask(path, shard_bytes=5_000, on_error="skip"))
    assert manifest.lines_skipped == 1
    assert sum(split.documents for split in manifest.splits.values()) == 300


ROWS = [f'{number},"row, {number}"' for number in range(1, 121)]


def _csv(folder: Path, rows: list[str], encoding: str = "utf-8") -> Path:
    path = folder / "a.csv"
    path.write_text("\n".join(["id,text", *rows]) + "\n", encoding=encoding)
    return path


@pytest.mark.parametrize("closed_by", ["end of file", "next quote", "two quotes"])
def test_an_open_quote_in_a_csv_is_named_with_its_line(tmp_path: Path, ask: Any, closed_by: str) -> None:
    """It takes in the rows after it, so that it is refused under --on-error skip too."""
    rows = list(ROWS)
    rows[50] = '51,"row 51'
    if closed_by == "end of file":
        rows[51:] = [f"{number},row" for number in range(52, 101)]
    elif closed_by == "two quotes":
        rows[51] = 'a","b'
    for on_error in ("stop", "skip"):
        with pytest.raises(UserError, match=r"a.csv:52: a quote that opens in this record"):
            prepare_corpus(ask(_csv(tmp_path, rows), on_error=on_error))


def test_bad_rows_of_a_csv_are_counted_one_by_one(tmp_path: Path, ask: Any) -> None:
    rows = list(ROWS)
    rows[10], rows[20], rows[30] = '11,"a"b', "21", '31,"caf\xe9\n, still this record"'
    manifest = prepare_corpus(ask(_csv(tmp_path, rows, "latin-1"), on_error="skip"))
    assert manifest.lines_skipped == 3
    assert sum(split.documents for split in manifest.splits.values()) == 117


def test_nested_fields_of_one_name_are_no_repetition(tmp_path: Path, ask: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"x": {{"text": 1}}, "text": "{text}"}}\n' for text in make_texts(100)))
    assert prepare_corpus(ask(path)).lines_skipped == 0


def cases(folder: Path) -> Iterator[tuple[str, list[Path | str], dict[str, Any], str]]:
    """Bad input, what is asked for, and words of the answer."""
    good = write_jsonl(folder / "good.jsonl", make_texts(100))
    yield "nothing matches", [folder / "none*.jsonl"], {}, "no input file matches"
    (folder / "empty").mkdir()
    yield "empty folder", [folder / "empty"], {}, "a folder without any such file"
    (folder / "a.docx").write_bytes(b"PK")
    yield "unknown kind", [folder / "a.docx"], {}, "unknown kind of file"
    (folder / "zero.jsonl").write_bytes(b"")
    yield "empty file", [folder / "zero.jsonl"], {}, "the corpus is empty"
    yield "only blanks", [write_jsonl(folder / "blank.jsonl", [" ", "\n", ""])], {}, "3 empty and 0 skipped"
    yield "few documents", [write_jsonl(folder / "few.jsonl", ["one", "two"])], {}, "no document fell into"
    (folder / "latin.txt").write_bytes(b"first\ncaf\xe9")
    yield "latin text", [folder / "latin.txt"], {}, r"latin.txt:2: not UTF-8 \(byte 9 of the file\)"
    (folder / "a.csv").write_text("id,body\n1,x\n")
    yield "no column", [folder / "a.csv"], {}, "fields 'id', 'body'"
    (folder / "twice.csv").write_text("text,id,text\na,1,b\n")
    yield "a column twice", [folder / "twice.csv"], {"on_error": "skip"}, "2 columns 'text'"
    (folder / "header.csv").write_text('"te"xt,id\na,1\n')
    yield "broken header", [folder / "header.csv"], {"on_error": "skip"}, "header.csv:1: broken CSV"
    (folder / "latin.csv").write_bytes(b"caf\xe9,text\na,1\n")
    yield "latin header", [folder / "latin.csv"], {"on_error": "skip"}, "latin.csv:1: not UTF-8"
    for number, (name, text) in enumerate(
        {"m.csv": "id,text\r1,a\r", "n.csv": "id,text\n1,a\r2,b\r", "m.jsonl": '{"text": 1}\r{"text": 2}\r'}.items()
    ):
        (folder / name).write_text(text, newline="")
        words = rf"{name}:{2 if number == 1 else 1}: the lines end in carriage returns only[\s\S]*tr '\\r' '\\n'"
        yield f"old Mac {name}", [folder / name], {"on_error": "skip"}, words
    (folder / "m.txt").write_text("a\rb\r", newline="")
    yield "old Mac text", [folder / "m.txt"], {"txt_unit": "line"}, "m.txt:1: the lines end in carriage returns only"
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    yield "no parquet", [folder / "a.parquet"], {}, "not a readable parquet file"
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(good.read_bytes())[:-300])
    yield "cut gzip", [folder / "cut.jsonl.gz"], {}, "cannot be decompressed"
    import pyarrow

    with pyarrow.output_stream(str(folder / "whole.jsonl.zst"), compression="zstd") as stream:
        stream.write(good.read_bytes())
    (folder / "cut.jsonl.zst").write_bytes((folder / "whole.jsonl.zst").read_bytes()[:-30])
    yield "cut zstd", [folder / "cut.jsonl.zst"], {}, "cannot be decompressed"
    yield "share of zero", [good], {"split": "99,1,0"}, "each of train, validation, test needs a share"
    yield "unknown policy", [good], {"on_error": "ignore"}, "stop or skip"


def test_bad_input_says_what_and_leaves_nothing(tmp_path: Path, ask: Any) -> None:
    for name, inputs, options, words in cases(tmp_path):
        with pytest.raises(UserError, match=words) as raised:
            prepare_corpus(ask(*inputs, **options))
        assert raised.value.exit_code == 2 and raised.value.expected and raised.value.found, name
        assert not (tmp_path / "out").exists(), name
