"""Code in a checkpoint or a Hugging Face folder is not run: each file of each is replaced by a malicious pickle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint_files import LIST
from common.errors import UserError
from common.files import file_sha256
from tests.convert.test_convert import TIED, make_hf
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


class Evil:
    """Makes the folder `ran` when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(Path.cwd() / "ran"),)


def _saved() -> bytes:
    stream = io.BytesIO()
    torch.save({"a": Evil()}, stream)
    return stream.getvalue()


def _replace_object(folder: Path, data: bytes) -> None:
    """Put `data` in the place of the first object (not a tensor) in the .distcp files, as .metadata describes it."""
    path = folder / "weights/.metadata"
    metadata = pickle.loads(path.read_bytes())
    index, info = next((i, s) for i, s in metadata.storage_data.items() if "_extra_state" in i.fqn)
    file = folder / "weights" / info.relative_path
    info.offset, info.length = file.stat().st_size, len(data)
    file.write_bytes(file.read_bytes() + data)
    path.write_bytes(pickle.dumps(metadata))


def _spoil(folder: Path, name: str) -> None:
    """Replace one file of a checkpoint by a pickle that runs code, in the form in which its reader expects it."""
    if name == "objects":
        _replace_object(folder, _saved())
    elif name == "weights/metadata.json":
        (folder / name).write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    else:
        (folder / name).write_bytes(_saved() if name.endswith("common.pt") else pickle.dumps(Evil()))


def _attempt(function: Callable[[], object]) -> tuple[str, bool]:
    """(the UserError's text, or "" if there was none; whether code ran)."""
    try:
        function()
        text = ""
    except UserError as error:
        text = error.explain()
    return text, Path("ran").exists()


def _in_each_file() -> dict[str, list[tuple[str, bool]]]:
    from convert.export_hf import export_hf
    from convert.import_hf import import_hf
    from convert.verify import verify

    make_hf(Path("hf"), **TIED)
    import_hf("hf", Path("base"))
    found = {}
    for file in sorted(path for path in Path("base").rglob("*") if path.is_file()):
        name = str(file.relative_to("base"))
        bad = Path("bad") / name.replace("/", "-")
        shutil.copytree("base", bad)
        _spoil(bad, name)
        found[name] = [
            _attempt(lambda: export_hf(bad, Path("out") / bad.name)),  # noqa: B023 - called at once
            _attempt(lambda: verify(bad, "hf", show=False)),  # noqa: B023
        ]
    return found


def test_a_pickle_in_any_file_of_a_checkpoint_is_not_run(forked: Callable[..., Any]) -> None:
    found = forked(_in_each_file)
    assert not [name for name, results in found.items() if any(ran for _, ran in results)]
    assert "weights/.metadata is not read" in found["weights/.metadata"][0][0]
    assert "posix.mkdir" in found["weights/.metadata"][1][0]
    assert "weights/common.pt is not read" in found["weights/common.pt"][1][0]
    assert "weights/metadata.json is not read" in found["weights/metadata.json"][0][0]


def _list_anew(checkpoint: Path) -> None:
    """Record new checksums after a file was changed, as an attacker can."""
    names = json.loads((checkpoint / LIST).read_text())
    rows = {one: {"bytes": (checkpoint / one).stat().st_size, "sha256": file_sha256(checkpoint / one)} for one in names}
    (checkpoint / LIST).write_text(json.dumps(rows))


def _resume(sample: Path, name: str) -> tuple[str, bool]:
    words = ("trainer.max_steps=2", *SHORT)
    train(sample, *words)
    _spoil(Path("runs/run/checkpoints/step-2"), name)
    _list_anew(Path("runs/run/checkpoints/step-2"))
    return _attempt(lambda: train(sample, "trainer.max_steps=4", *SHORT, resume=True))


@pytest.mark.parametrize(
    ("name", "file"),
    [("weights/.metadata", ".metadata"), ("weights/common.pt", "common.pt"), ("objects", ".distcp")],
)
def test_resume_runs_no_code(sample: Path, forked: Callable[..., Any], name: str, file: str) -> None:
    """Through Megatron's own loader; without `data_only` in training/strategy.py the code runs."""
    text, ran = forked(_resume, sample, name)
    assert not ran
    assert f"{file} is not read" in text


def _through_other_doors(sample: Path, name: str) -> dict[str, tuple[str, bool]]:
    """What starts from, evaluates or merges a checkpoint that somebody else wrote."""
    import nemo_run as run
    from nemo import lightning as nl

    from launcher.merge_run import soup
    from recipes import registry
    from report.evaluation.evaluate import _as_folder

    train(sample, "trainer.max_steps=4", "log.ckpt.every_n_train_steps=2", *SHORT)
    first, last = (Path("runs/run/checkpoints") / f"step-{step}" for step in (2, 4))
    for checkpoint in (first, last):
        (checkpoint / "run/files.json").unlink()  # an attacker can list the files anew
    _spoil(last, name)

    def evaluate() -> None:
        with _as_folder("run", Path("runs")):
            pass

    def start_from() -> None:
        recipe = registry.resolve("qwen25_tiny")
        build = recipe.build

        def from_elsewhere(plan: Any) -> Any:
            partial = build(plan)
            partial.resume.restore_config = run.Config(nl.RestoreConfig, path=str(last), load_artifacts=False)
            return partial

        recipe.build = from_elsewhere
        train(sample, "trainer.max_steps=1", *SHORT, name="new")

    doors = {"evaluate": evaluate, "soup": lambda: soup("run", None, "uniform", None), "restore_config": start_from}
    return {door: _attempt(function) for door, function in doors.items()}


@pytest.mark.parametrize("name", ["weights/.metadata", "weights/common.pt", "objects"])
def test_no_door_runs_code_of_a_checkpoint(sample: Path, forked: Callable[..., Any], name: str) -> None:
    found = forked(_through_other_doors, sample, name)
    assert not [door for door, (_, ran) in found.items() if ran]
    print(*(f"{door}: {text}" for door, (text, _) in found.items()), sep="\n")
    assert "is not read" in found["restore_config"][0]
    if name == "weights/.metadata":
        assert all(f"{name} cannot be read" in found[door][0] for door in ("evaluate", "soup"))


def _context_of_nemo(base: Path) -> None:
    from nemo import lightning as nl

    from training.restore import StartFrom

    StartFrom(restore_config=nl.RestoreConfig(path=str(base))).setup(trainer=None)


def test_the_context_is_never_loaded(forked: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="load_artifacts=False"):
        forked(_context_of_nemo, Path("base"))


REMOTE = """import os
os.mkdir({here!r})
"""


def _in_hf_folder() -> dict[str, tuple[str, bool]]:
    from convert.generate import generate
    from convert.import_hf import import_hf
    from data.tokenizer import load_tokenizer

    make_hf(Path("hf"), **TIED)
    shutil.copytree("hf", "pickled")
    Path("pickled/model.safetensors").unlink()
    Path("pickled/pytorch_model.bin").write_bytes(_saved())
    found = {
        "import": _attempt(lambda: import_hf("pickled", Path("out1"))),
        "import, trusted": _attempt(lambda: import_hf("pickled", Path("out1"), trust_pickle=True)),
        "generate": _attempt(lambda: generate(Path("pickled"), "the", 2)),
    }
    shutil.copytree("hf", "remote")
    for file, key in (("config.json", "AutoModelForCausalLM"), ("tokenizer_config.json", "AutoTokenizer")):
        row = json.loads(Path("remote", file).read_text())
        names = ["code.Mine", "code.Mine"] if key == "AutoTokenizer" else "code.Mine"
        row |= {"auto_map": {"AutoConfig": "code.Mine", key: names}}
        row |= {"model_type": "mine"} if key != "AutoTokenizer" else {"tokenizer_class": "Mine"}
        Path("remote", file).write_text(json.dumps(row))
    Path("remote/code.py").write_text(REMOTE.format(here=str(Path.cwd() / "ran")))
    found["generate, remote code"] = _attempt(lambda: generate(Path("remote"), "the", 2))
    found["tokenizer, remote code"] = _attempt(lambda: load_tokenizer("remote"))
    return found


def test_a_pickle_or_code_in_a_hugging_face_folder_is_not_run(forked: Callable[..., Any]) -> None:
    found = forked(_in_hf_folder)
    print(*(f"{name}\n{text}" for name, (text, _) in found.items()), sep="\n")
    assert not [name for name, (_, ran) in found.items() if ran]
    for name in ("import", "import, trusted", "generate"):
        assert "pytorch_model.bin" in found[name][0], found[name]
    assert "--trust-pickle" in found["import"][0]
    assert all("remote" in found[name][0] for name in ("generate, remote code", "tokenizer, remote code"))


def _pickled_weights() -> tuple[bool, bool]:
    from safetensors.torch import load_file

    from convert.import_hf import import_hf
    from convert.verify import verify

    make_hf(Path("hf"), **TIED)
    shutil.copytree("hf", "pickled")
    torch.save(load_file("pickled/model.safetensors"), "pickled/pytorch_model.bin")
    Path("pickled/model.safetensors").unlink()
    return verify(import_hf("pickled", Path("base"), trust_pickle=True), "hf", show=False).ok, Path("pickled").exists()


def test_trusted_pickles_are_the_same_weights(forked: Callable[..., Any]) -> None:
    assert forked(_pickled_weights) == (True, True)


def _extra_states() -> list[str]:
    from training.safe_load import check_extra_states

    def as_tensor(value: object) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    states: list[Any] = [torch.empty(0, dtype=torch.uint8), as_tensor(None), as_tensor(Evil()), io.BytesIO(_saved())]
    return [
        _attempt(lambda: check_extra_states({"m": {"layer._extra_state": one}}, Path("folder")))[0]  # noqa: B023
        for one in states
    ] + [str(Path("ran").exists())]


def test_the_state_of_a_transformer_engine_module_is_plain_data(forked: Callable[..., Any]) -> None:
    empty, none, evil, saved, ran = forked(_extra_states)
    assert (empty, none, ran) == ("", "", "False")
    assert "layer._extra_state is not read" in evil and "layer._extra_state is not read" in saved


@pytest.mark.parametrize(("folder", "is_own"), [("runs/mine/checkpoints/step-5", True), ("runs/other/step-5", False)])
def test_fp8_states_are_read_from_checkpoints_of_this_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_own: bool
) -> None:
    """They hold tensors, so that they cannot be told from malicious ones."""
    from training import strategy
    from training.checkpoints import StepCheckpoint

    state = torch.frombuffer(bytearray(pickle.dumps(Evil())), dtype=torch.uint8)
    found: Any = strategy.Strategy.__new__(strategy.Strategy)
    found._load_without_missing = lambda *_: {"state_dict": {"layer._extra_state": state}}
    config = types.SimpleNamespace(config=types.SimpleNamespace(fp8="hybrid"))
    monkeypatch.setattr(strategy.Strategy, "lightning_module", config)
    callbacks = [StepCheckpoint(run_dir=str(tmp_path / "runs/mine"))]
    found.trainer = types.SimpleNamespace(callbacks=callbacks)
    with contextlib.nullcontext() if is_own else pytest.raises(UserError, match="layer._extra_state is not read"):
        found.load_checkpoint(tmp_path / folder)


def test_members_of_enums_are_read_as_older_pythons_wrote_them() -> None:
    """Python 3.11.0 to 3.11.4 pickle them through getattr, which is given nothing else."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as ENCODING

    from training.safe_load import _MetadataUnpickler

    class Older:
        def __init__(self, *args: object) -> None:
            self.args = args

        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, self.args

    def read(*args: object) -> object:
        return _MetadataUnpickler(io.BytesIO(pickle.dumps(Older(*args)))).load()

    assert read(ENCODING, "TORCH_CONTIGUOUS_FORMAT") is ENCODING.TORCH_CONTIGUOUS_FORMAT
    with pytest.raises(pickle.UnpicklingError, match="attribute"):
        read(torch.Size, "__reduce__")
