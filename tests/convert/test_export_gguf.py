"""An exported model as a GGUF file: read by transformers, and run by llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from convert.export_gguf import check_request, export_gguf

gguf_installed = importlib.util.find_spec("gguf") is not None
needs_gguf = pytest.mark.skipif(not gguf_installed, reason="the gguf package is not installed")
PROMPT = "def main(argument):\n    return 'It\\'s 42 degrees', argument"


@pytest.mark.parametrize(("kind", "made", "what"), [("q4", True, "unknown type"), ("bf16", False, "no model in")])
def test_bad_requests(kind: str, made: bool, what: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if made:
            (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=what):
        check_request(tmp_path, tmp_path / "model.gguf", kind)


def _make(folder: Path) -> None:
    import torch

    from tests.convert.test_convert import TIED, make_hf

    make_hf(folder, **TIED | {"hidden": 128}, dtype=torch.bfloat16, eos_token_id=0, bos_token_id=0)


@pytest.fixture(scope="module")
def exported(nemo: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied bf16 Qwen2 with a tokenizer that cuts text as Qwen2's does."""
    from tests.conftest import call_in_fork

    folder = tmp_path_factory.mktemp("gguf") / "model"
    call_in_fork(_make, folder, cwd=folder.parent)
    return folder


def _compare_with_transformers(exported: Path) -> tuple[list[str], list[str], list[int]]:
    """The weights that differ; the text that transformers and llama.cpp add; the ids in the prompt by each of them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = export_gguf(exported, Path("model-bf16.gguf"))
    model = AutoModelForCausalLM.from_pretrained(exported, torch_dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(".", gguf_file=file.name, torch_dtype=torch.float32).state_dict()
    different = [name for name, weight in model.state_dict().items() if not torch.equal(weight, read[name])]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=20, do_sample=False, suppress_tokens=[0], pad_token_id=0)
    length = inputs["input_ids"].shape[1]
    texts, lengths = [tokenizer.decode(out[0, length:])], [length]
    if importlib.util.find_spec("xllamacpp") is not None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(file), 512, 1, 1
        request = {"prompt": PROMPT, "n_predict": 20, "temperature": 0.0, "ignore_eos": True}
        answer: Any = xllamacpp.Server(params).handle_completions(request)
        texts.append(answer["choices"][0]["text"])
        lengths.append(answer["usage"]["prompt_tokens"])
    return different, texts, lengths


@needs_gguf
@pytest.mark.nemo
def test_llama_cpp_generates_what_transformers_does(exported: Path, forked: Callable[..., Any]) -> None:
    """The same weights, as many ids for a text, and the same 20 greedy tokens."""
    different, texts, lengths = forked(_compare_with_transformers, exported)
    assert not different
    if len(texts) == 1:
        pytest.skip("llama.cpp's package xllamacpp is not installed")
    assert texts[0] == texts[1] and len(texts[0]) > 20 and lengths[0] == lengths[1]


def _with(folder: Path, name: str, file: str, **changes: Any) -> Path:
    """A copy of the model in which a JSON file has other values; None removes one."""
    shutil.copytree(folder, name)
    path = Path(name) / file
    told = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    return Path(name)


def _ends_of_text(exported: Path) -> tuple[dict[str, int], list[list[str]], list[str]]:
    """eos in the files of three folders; their control tokens; the errors of two folders without an end."""
    import gguf

    told = json.loads((exported / "tokenizer.json").read_text())
    other = next(word for word, number in told["model"]["vocab"].items() if number == 7)
    added = [*told["added_tokens"], {**told["added_tokens"][0], "id": 7, "content": other, "special": True}]
    ends, control, errors = {}, [], []
    # tokenizer_config.json of an instruct model names another token than config.json of the base
    named = _with(exported, "named", "tokenizer_config.json", eos_token=other)
    (named / "tokenizer.json").write_text(json.dumps({**told, "added_tokens": added}))
    _with(exported, "several", "config.json", eos_token_id=[3, 0])
    for name, folder in {"same": exported, "named": named, "several": Path("several")}.items():
        reader = gguf.GGUFReader(export_gguf(folder, Path(f"{name}.gguf")))
        ends[name] = reader.fields["tokenizer.ggml.eos_token_id"].contents()
        words, kinds = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
        control.append([w for w, kind in zip(words, kinds, strict=True) if kind == gguf.TokenType.CONTROL])
        assert {tensor.name for tensor in reader.tensors} >= {"token_embd.weight", "output_norm.weight"}
        assert "output.weight" not in {tensor.name for tensor in reader.tensors}  # tied
    for name, end in {"none": None, "beyond": 10**6}.items():
        try:
            export_gguf(_with(exported, name, "config.json", eos_token_id=end), Path(f"{name}.gguf"))
        except UserError as error:
            errors.append(error.explain())
    return ends, control, errors


@needs_gguf
@pytest.mark.nemo
def test_the_end_of_a_text_is_that_of_config_json(exported: Path, forked: Callable[..., Any]) -> None:
    ends, control, errors = forked(_ends_of_text, exported)
    assert ends == {"same": 0, "named": 0, "several": 3}
    assert control[0] == control[2] == ["<|endoftext|>"] and len(control[1]) == 2
    assert len(errors) == 2 and all("has no token that ends a text" in error for error in errors)


def _refusals(exported: Path) -> list[str]:
    told = json.loads((exported / "tokenizer.json").read_text())
    steps = told["pre_tokenizer"]["pretokenizers"]
    changes: dict[str, dict[str, Any]] = {
        "bytes": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}},
        "prefix": {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [steps[0], {**steps[1], "add_prefix_space": 1}]}
        },
        "nfkc": {"normalizer": {"type": "NFKC"}},
    }
    found = []
    for name, change in changes.items():
        try:
            export_gguf(_with(exported, name, "tokenizer.json", **change), Path(f"{name}.gguf"))
        except UserError as error:
            found.append(error.what)
    return [*found, *(path.name for path in Path().glob("*.gguf*")), *(path.name for path in Path().glob(".*.gguf*"))]


@needs_gguf
@pytest.mark.nemo
def test_a_tokenizer_that_llama_cpp_does_not_know(exported: Path, forked: Callable[..., Any]) -> None:
    """Another expression, another byte level, another normaliser; nothing is left behind."""
    assert forked(_refusals, exported) == ["llama.cpp does not know this tokenizer"] * 3


def _difference(exported: Path, kind: str) -> float:
    """What the log says of the largest difference."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("launch").addHandler(handler)
    logging.getLogger("launch").setLevel(logging.INFO)
    export_gguf(exported, Path("model.gguf"), kind)
    return float(messages[-1].rsplit(" ", 1)[1])


@needs_gguf
@pytest.mark.nemo
@pytest.mark.parametrize(("kind", "most"), [("f32", 0.0), ("f16", 1e-3), ("q8_0", 1e-2)])
def test_other_types_stay_close(kind: str, most: float, exported: Path, forked: Callable[..., Any]) -> None:
    assert forked(_difference, exported, kind) <= most
