"""An exported model as a GGUF file: read by transformers, and run by llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
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


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied bf16 Qwen2 with a tokenizer that cuts text as Qwen2's does."""
    import torch

    from tests.convert.test_convert import TIED, make_hf

    folder = tmp_path_factory.mktemp("gguf") / "model"
    make_hf(folder, **TIED | {"hidden": 128}, dtype=torch.bfloat16, eos_token_id=0, bos_token_id=0)
    return folder


@needs_gguf
@pytest.mark.nemo
def test_llama_cpp_generates_what_transformers_does(exported: Path, tmp_path: Path) -> None:
    """The same ids for a text, the same weights, and the same 20 greedy tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = export_gguf(exported, tmp_path / "model-bf16.gguf")
    model = AutoModelForCausalLM.from_pretrained(exported, torch_dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, torch_dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, read.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp's package xllamacpp is not installed")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(file), 512, 1, 1
    server = xllamacpp.Server(params)
    request = {"prompt": PROMPT, "n_predict": 20, "temperature": 0.0, "ignore_eos": True}
    answer: Any = server.handle_completions(request)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=20, do_sample=False, suppress_tokens=[0], pad_token_id=0)
    new = out[0, inputs["input_ids"].shape[1] :]
    assert answer["usage"]["prompt_tokens"] == inputs["input_ids"].shape[1]
    assert len(new) == 20 and answer["choices"][0]["text"] == tokenizer.decode(new)


@needs_gguf
@pytest.mark.nemo
def test_a_tokenizer_that_llama_cpp_does_not_know(exported: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(exported, tmp_path / "other")
    file = tmp_path / "other/tokenizer.json"
    told = json.loads(file.read_text())
    told["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    file.write_text(json.dumps(told))
    with pytest.raises(UserError, match="does not know this tokenizer"):
        export_gguf(tmp_path / "other", tmp_path / "other.gguf")
    assert list(tmp_path.glob("*.gguf")) == [] and list(tmp_path.glob(".*.gguf*")) == []


@needs_gguf
@pytest.mark.nemo
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
def test_other_types_stay_close(kind: str, exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        export_gguf(exported, tmp_path / "model.gguf", kind)
    difference = float(caplog.messages[-1].rsplit(" ", 1)[1])
    assert difference <= {"f32": 0.0, "f16": 1e-3, "q8_0": 1e-2}[kind]
