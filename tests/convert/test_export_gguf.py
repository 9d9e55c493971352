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


@needs_gguf
@pytest.mark.nemo
def test_a_tokenizer_that_llama_cpp_does_not_know(exported: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    shutil.copytree(exported, tmp_path / "other")
    file = tmp_path / "other/tokenizer.json"
    told = json.loads(file.read_text())
    told["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    file.write_text(json.dumps(told))
    with pytest.raises(UserError, match="does not know this tokenizer"):
        forked(export_gguf, tmp_path / "other", tmp_path / "other.gguf")
    assert list(tmp_path.glob("*.gguf")) == [] and list(tmp_path.glob(".*.gguf*")) == []


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
