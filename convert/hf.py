"""A Hugging Face model folder: open and check it, read its tensors, copy its other files, write a new one."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.hub import check_model_name
from convert.hf_config import check_supported, read_architecture, read_json
from convert.tensor_map import hf_shapes
from training.safe_load import pickled_weights, refused

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_IGNORED = ".rotary_emb.inv_freq"  # a constant that transformers before 4.32 saved with the weights


class HFFolder:
    """A Qwen2 model as transformers saves it. Opening it checks names, shapes and dtypes; weights are read on demand.

    Raises:
        UserError: not a Qwen2 model that Megatron supports, or an incomplete folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        check_supported(self.config, path)
        self.arch = read_architecture(self.config)
        self.files = _weight_files(path)
        shapes, self.dtypes = self._read_headers()
        _check_tensors(self, shapes)

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest dtype of the stored weights."""
        return torch.bfloat16 if torch.bfloat16 in self.dtypes.values() else torch.float32

    @property
    def num_bytes(self) -> int:
        """Size of all weight files."""
        return sum(file.stat().st_size for file in set(self.files.values()))

    @cached_property
    def _open(self) -> dict[Path, Any]:
        from safetensors import safe_open

        return {file: safe_open(file, framework="pt") for file in set(self.files.values())}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its HF name, in its stored dtype."""
        return self._open[self.files[name]].get_tensor(name)  # type: ignore[no-any-return]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) in the order of `hf_shapes`."""
        return ((name, self.tensor(name)) for name in hf_shapes(self.arch))

    def _read_headers(self) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype]]:
        """Shape and dtype of every tensor, from the headers of the safetensors files."""
        shapes, dtypes = {}, {}
        for name, file in self.files.items():
            try:
                part = self._open[file].get_slice(name)
            except Exception as error:  # safetensors has its own error type for a truncated file or a missing name
                raise _unreadable(file, f"{name}: {error}") from None
            if part.get_dtype() not in DTYPES:
                raise UserError(
                    f"{self.path}: {name} is stored as {part.get_dtype()}",
                    expected="weights in fp32 or bf16",
                    found=part.get_dtype(),
                    do="use the unquantised model (Qwen2.5-0.5B, not -GPTQ, -AWQ or -GGUF), or save it again in bf16",
                )
            shapes[name], dtypes[name] = tuple(part.get_shape()), DTYPES[part.get_dtype()]
        return shapes, dtypes


def fetch_model(source: str, *, pickles: bool = False) -> Path:
    """The local folder of `source`: a path, or a hub id (downloaded to the HF cache, or found there).

    Args:
        pickles: download pytorch_model*.bin too.

    Raises:
        UserError: no such folder, or a hub id that can be neither reached nor found in the cache.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    check_model_name(source)
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.txt", "*.jinja", "*.safetensors", *(["pytorch_model*.bin"] if pickles else [])]
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # connection, authentication, missing repository: the hub has a class for each
        raise UserError(
            f"hub model {source!r} cannot be fetched",
            expected="a model in the HF cache, or a machine that reaches huggingface.co",
            found=f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}",
            do=f"on a machine with network: huggingface-cli download {source} --local-dir base; then give the path",
        ) from None


@contextlib.contextmanager
def pickles_as_safetensors(path: Path) -> Iterator[Path]:
    """A temporary copy of a Hugging Face folder whose pytorch_model*.bin are written as safetensors.

    Holds the model in memory once. The pickles are read with torch's `weights_only`, so that no code in them is run.

    Raises:
        UserError: no such file, or one that holds more than tensors.
    """
    files, tensors = sorted(path.glob("pytorch_model*.bin")), {}
    if not files:
        raise _unreadable(path / "pytorch_model.bin", "no such file")
    for file in files:
        try:
            tensors.update(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged pickle can raise anything
            raise refused(file, error) from None
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        copy_assets(path, Path(folder))
        write_weights(Path(folder), tensors)
        yield Path(folder)


def _weight_files(path: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file; no tensor is read."""
    from safetensors import safe_open

    if (path / INDEX).is_file():
        files = {name: path / file for name, file in read_json(path / INDEX)["weight_map"].items()}
    elif (path / "model.safetensors").is_file():
        try:
            with safe_open(path / "model.safetensors", framework="pt") as file:
                files = dict.fromkeys(file.keys(), path / "model.safetensors")
        except Exception as error:  # safetensors' own error type
            raise _unreadable(path / "model.safetensors", str(error)) from None
    else:
        pickled = pickled_weights(path)
        raise UserError(
            f"{path} has no weights",
            expected=f"model.safetensors, or {INDEX} with its files",
            found=f"only {', '.join(pickled)} (pickle)" if pickled else "neither",
            do=f"if you trust who made it: `python launch.py convert import {path} models/base --trust-pickle`; "
            "`convert export models/base DIR` then writes it as safetensors"
            if pickled
            else "download the *.safetensors files too",
        )
    for file in sorted(set(files.values())):
        if not file.is_file():
            raise _unreadable(file, "no such file")
    return {name: file for name, file in files.items() if not name.endswith(_IGNORED)}


def _unreadable(file: Path, found: str) -> UserError:
    return UserError(
        f"{file} cannot be read", expected="a complete safetensors file", found=found, do="download or copy it again"
    )


def _check_tensors(folder: HFFolder, found: dict[str, tuple[int, ...]]) -> None:
    """Exactly the tensors of the architecture, each of its shape; a tied model may store its output layer too."""
    wanted = hf_shapes(folder.arch)
    if folder.arch.tied and "lm_head.weight" in found:
        found = {name: shape for name, shape in found.items() if name != "lm_head.weight"}
        if not torch.equal(folder.tensor("lm_head.weight"), folder.tensor("model.embed_tokens.weight")):
            raise _mismatch(folder.path, "tie_word_embeddings is true but lm_head.weight is not the embedding")
    problems = [f"missing {name}" for name in wanted if name not in found]
    problems += [f"unknown {name}" for name in found if name not in wanted]
    problems += [
        f"{name} is {list(found[name])}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise _mismatch(folder.path, "; ".join(problems[:4]) + more)


def _mismatch(path: Path, found: str) -> UserError:
    return UserError(
        f"{path}: the weights are not what config.json describes",
        expected="one tensor for each name of transformers' Qwen2ForCausalLM, of the config's shape",
        found=found,
        do="check that config.json and the safetensors belong together",
    )


def list_assets(path: Path) -> list[Path]:
    """The folder's config.json, generation_config.json and tokenizer files, those that exist.

    Raises:
        UserError: no tokenizer.
    """
    found = [path / name for name in (CONFIG, GENERATION, *TOKENIZER_FILES) if (path / name).is_file()]
    if not any(file.name == "tokenizer.json" for file in found):
        raise UserError(
            f"{path} has no tokenizer",
            expected="tokenizer.json and tokenizer_config.json beside the weights",
            found=", ".join(file.name for file in found) or "nothing",
            do="copy the tokenizer's files of the same model into the folder",
        )
    return found


def copy_assets(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer files byte by byte, so that every setting in them is kept."""
    target.mkdir(parents=True, exist_ok=True)
    for file in list_assets(source):
        shutil.copyfile(file, target / file.name)


@contextlib.contextmanager
def copy_tokenizer_to_temp(source: Path) -> Iterator[Path]:
    """A temporary folder named `tokenizer` that holds the tokenizer's files and nothing else."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "tokenizer"
        folder.mkdir()
        for file in list_assets(source):
            if file.name in TOKENIZER_FILES:
                shutil.copyfile(file, folder / file.name)
        yield folder


def fingerprint_model(path: Path) -> str:
    """SHA-256 (hex) over the names and bytes of config, tokenizer and weight files."""
    total = hashlib.sha256()
    for file in sorted([*list_assets(path), *path.glob("*.safetensors")]):
        total.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as handle:
            while block := handle.read(1 << 22):
                total.update(block)
    return total.hexdigest()


def write_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write safetensors files of at most 5 GB each, with an index if there are several."""
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict({name: tensor.contiguous() for name, tensor in tensors.items()}, folder)
