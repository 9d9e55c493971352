"""Records of messages become text by the chat template; data sets that `datasets` saved are read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from common.errors import UserError
from data.inspect import open_pair
from data.manifest import SPLITS
from data.prepare.chat import ChatTemplate
from data.prepare.prepare import prepare_corpus
from data.tokenizer import load_tokenizer
from tests.data.corpora import FILES, documents, make_texts, write_jsonl

# the shape of Qwen2.5's: a turn between two control tokens; here the vocabulary has only <|endoftext|>
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message.role }}: {{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
)
GOOD = [{"role": "user", "content": " 日本語? "}, {"role": "assistant", "content": "river"}]
BAD: dict[str, tuple[Any, str]] = {
    "text": ("user: hi", "field 'messages' holds no messages"),
    "no messages": ([], "field 'messages' holds no messages"),
    "no role": ([{"content": "a"}], "message 1 has no role"),
    "no content": ([*GOOD, {"role": "user", "content": None}], "the content of message 3 is no text"),
    "control token": ([{"role": "user", "content": "a<|endoftext|>b"}], "message 1 spells the control token"),
    "refused": ([{"role": "tool", "content": "a"}], "the chat template refuses: no tools"),
    "surrogate": ([{"role": "user", "content": "\ud800"}], "no valid Unicode"),
}


@pytest.fixture
def chat_tokenizer(tokenizer_dir: Path, tmp_path: Path) -> Path:
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def _write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"messages": record}) + "\n" for record in records))
    return path


def test_messages_become_turns_with_control_tokens(tmp_path: Path, ask: Any, chat_tokenizer: Path) -> None:
    sharegpt = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    plain = [text.replace("<|endoftext|>", "") for text in make_texts(60)]
    records = [GOOD, sharegpt, *[[{"role": "user", "content": text}] for text in plain]]
    options = {"tokenizer": str(chat_tokenizer), "field": "messages", "chat": True}
    manifest = prepare_corpus(ask(_write(tmp_path / "a.jsonl", records), **options))
    assert manifest.settings["special_text"] == "control" and len(manifest.settings["chat_template"]) == 16
    tokenizer = load_tokenizer(chat_tokenizer)
    end = tokenizer.eos_token_id
    found = []
    for split in SPLITS:
        pair, start = open_pair(tmp_path / "out" / split), 0
        for length in pair.lengths.tolist():
            found.append(pair.ids[start : start + length].tolist())
            start += length

    def turn(text: str) -> list[int]:
        return [*tokenizer.encode(text), end]

    newline = tokenizer.encode("\n")
    assert [*turn("user: 日本語?"), *turn("\nassistant: river"), *newline, end] in found
    assert [*turn("user: a"), *turn("\nassistant: b"), *newline, end] in found
    pyarrow.parquet.write_table(pyarrow.table({"messages": records[2:]}), tmp_path / "b.parquet", row_group_size=20)
    two = prepare_corpus(ask(tmp_path / "b.parquet", output=tmp_path / "two", **options))
    assert sum(split.documents for split in two.splits.values()) == 60
    with pytest.raises(UserError, match="made differently"):  # as text, it is another corpus
        prepare_corpus(ask(tmp_path / "b.parquet", output=tmp_path / "two", tokenizer=str(chat_tokenizer)))


@pytest.mark.parametrize("name", BAD)
def test_bad_messages_stop_with_their_line_or_are_counted(
    tmp_path: Path, ask: Any, chat_tokenizer: Path, name: str
) -> None:
    bad, message = BAD[name]
    path = _write(tmp_path / "a.jsonl", [*[GOOD, [{"role": "user", "content": "x"}]] * 20, bad])
    options = {"tokenizer": str(chat_tokenizer), "field": "messages", "chat": True}
    with pytest.raises(UserError, match=f"a.jsonl:41: .*{message}"):
        prepare_corpus(ask(path, **options))
    assert not (tmp_path / "out").exists()


def test_chat_needs_a_template_and_files_that_hold_lists(tmp_path: Path, ask: Any, chat_tokenizer: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(UserError, match="has no chat template"):
        prepare_corpus(ask(path, chat=True, field="messages"))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="cannot hold messages"):
        prepare_corpus(ask(tmp_path / "a.txt", chat=True, tokenizer=str(chat_tokenizer)))
    tokenizer = load_tokenizer(chat_tokenizer)
    tokenizer.chat_template = "{% for"
    with pytest.raises(UserError, match="cannot be read"):
        ChatTemplate.of(tokenizer, [])


@pytest.mark.nemo
def test_the_template_is_run_as_transformers_runs_it() -> None:
    """transformers' own function, on what templates use: blocks with white space, tojson, loop controls, no date."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers.tokenization_utils_fast import PreTrainedTokenizerFast

    source = (
        "{{ bos_token }}\n{% for m in messages %}\n    {% if loop.first %}\n{% continue %}\n{% endif %}\n"
        "  {{ m | tojson }}{{ m.content.strip() }}\n{% endfor %}\n{% if add_generation_prompt %}x{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), bos_token="<s>")
    tokenizer.chat_template = source
    messages = [*GOOD, {"role": "user", "content": "<é>  "}]
    sent_to_a_worker = pickle.loads(pickle.dumps(ChatTemplate.of(tokenizer, [])))
    assert sent_to_a_worker.render(messages, "") == tokenizer.apply_chat_template(messages, tokenize=False)


def _save_to_disk(folder: Path, texts: list[str]) -> Path:
    """The files of `datasets.Dataset.save_to_disk`, in two shards."""
    folder.mkdir(parents=True)
    for number in range(2):
        part = texts[number * len(texts) // 2 : (number + 1) * len(texts) // 2]
        table = pyarrow.table({"text": part})
        with pyarrow.ipc.new_stream(folder / f"data-{number:05d}-of-00002.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=70)
    (folder / "state.json").write_text('{"_data_files": []}')
    (folder / "dataset_info.json").write_text('{"features": {}}')
    return folder


def test_a_data_set_on_disk(tmp_path: Path, ask: Any) -> None:
    texts = make_texts(300)
    folder = _save_to_disk(tmp_path / "set" / "train", texts)
    prepare_corpus(ask(folder))
    prepare_corpus(ask(write_jsonl(tmp_path / "a.jsonl", texts), output=tmp_path / "jsonl"))
    assert all((tmp_path / "out" / name).read_bytes() == (tmp_path / "jsonl" / name).read_bytes() for name in FILES)
    assert sorted(sum((documents(tmp_path / "out", split) for split in SPLITS), [])) == sorted(texts)
    with pytest.raises(UserError, match=r"no column 'txt'[\s\S]*did you mean 'text'"):
        prepare_corpus(ask(folder, field="txt", output=tmp_path / "b"))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UserError, match=r"several splits[\s\S]*give \S*set/train"):
        prepare_corpus(ask(tmp_path / "set", output=tmp_path / "b"))
    (file, *_) = sorted(folder.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a readable arrow file"):
        prepare_corpus(ask(folder, output=tmp_path / "b"))
