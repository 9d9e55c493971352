"""Reads checkpoints and models from elsewhere as data: no code that a file may contain is run.

A NeMo checkpoint is full of pickles (weights/.metadata, weights/common.pt, the objects inside weights/*.distcp), and a
pickle can call any function while it is read. megatron-core 0.12 to 0.15 and torch 2.6 to 2.13 read all three without a
restriction; nemo_toolkit 2.3 and its dependencies do the same (CVE-2026-24157 and CVE-2026-24159 are of this kind).
`data_only` restricts every such read inside its block. Test: tests/training/test_safe_load.py.

This file is in training/ because that is the lowest folder that may import torch and is used by convert/ and by the
ranks themselves.
"""

from __future__ import annotations

import contextlib
import enum
import io
import os
import pathlib
import pickle
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner, filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from common.errors import UserError
from common.json_files import parse_json

# All that a genuine weights/.metadata names, with torch's dtypes (torch 2.6 to 2.13, megatron-core 0.12 and 0.13).
_METADATA_NAMES = {
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreSavePlan"},
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"BytesIOWriteData", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
}
_SAFE_IN_COMMON: list[Any] = [pathlib.PosixPath]  # beside what torch's weights_only accepts: tensors and plain values
_FORMATS = {"sharded_backend": "torch_dist", "common_backend": "torch"}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads weights/.metadata; any name that is not in the table is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name == "getattr":
            return _enum_member  # how Python 3.11.0 to 3.11.4 pickle a member of an enum
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _enum_member(kind: Any, name: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for an attribute {name!r}")


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


@contextlib.contextmanager
def data_only(checkpoint: Path) -> Iterator[None]:
    """Inside this block torch, Megatron and NeMo read every pickle of a NeMo checkpoint as data.

    Replaced for that time: the unpickler of torch's FileSystemReader, `torch.load` (with `weights_only=True`, also
    where the caller asks for the opposite), and the error of torch's load planner, which gets the name of the file.

    Args:
        checkpoint: the checkpoint, or its weights folder; named in errors.

    Raises:
        UserError: a file holds more than data, or is damaged, or the checkpoint is of another format than torch_dist.
    """
    weights = checkpoint / "weights" if (checkpoint / "weights").is_dir() else checkpoint
    _check_format(weights / "metadata.json")
    planner_type = default_planner.DefaultLoadPlanner
    load, load_bytes = torch.load, planner_type.load_bytes

    def load_data(file: Any, *args: Any, **kwargs: Any) -> Any:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", weights / "*.distcp")
        with _named(None if isinstance(file, io.BytesIO) else path), torch.serialization.safe_globals(_SAFE_IN_COMMON):
            return load(file, *args, **{**kwargs, "weights_only": True})

    def load_bytes_of_file(planner: Any, item: Any, value: io.BytesIO) -> None:
        with _named(weights / planner.metadata.storage_data[item.storage_index].relative_path):
            load_bytes(planner, item, value)

    restricted = types.SimpleNamespace(**{**vars(pickle), "load": _read_metadata})
    with (
        _replaced(filesystem, "pickle", restricted),
        _replaced(torch, "load", load_data),
        _replaced(planner_type, "load_bytes", load_bytes_of_file),
    ):
        try:
            yield
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise _first_user_error(error) or error from None


def _first_user_error(error: BaseException | None) -> UserError | None:
    """The UserError behind an error: torch wraps what happened on the ranks, and NeMo wraps that."""
    while error is not None and not isinstance(error, UserError):
        if isinstance(error, CheckpointException):
            problems = [problem for problem, _ in error.failures.values() if isinstance(problem, UserError)]
            return problems[0] if problems else None
        error = error.__cause__ or error.__context__
    return error


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _read_metadata(stream: Any) -> Any:
    with _named(stream.name):
        found = _MetadataUnpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
        return found


@contextlib.contextmanager
def _named(file: Any) -> Iterator[None]:
    """Turn what a damaged or malicious pickle raises into an error that names the file (None: the caller does)."""
    try:
        yield
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        if file is None:
            raise
        raise refused(file, error) from None


def refused(file: Any, found: Exception | str) -> UserError:
    """The error for a file that holds more than data, or is damaged."""
    reason = found if isinstance(found, str) else f"{type(found).__name__}: {_one_line(found)}"
    return UserError(
        f"{file} is not read: it holds more than data, or is damaged",
        expected="tensors and plain values only; a checkpoint is data, and no code in it is run",
        found=reason,
        do="copy the checkpoint again from a source that you trust; if it is like that there, "
        "let its maker export it as safetensors, and `python launch.py convert import` that",
    )


def _one_line(error: Exception) -> str:
    if name := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):  # torch's text has twelve lines
        return f"it names {name[1]}"
    return " ".join(str(error).split())[:200]


def _check_format(file: Path) -> None:
    """Megatron's other formats (zarr, and what a plugin registers) have readers that nothing restricts."""
    if not file.is_file():
        return  # reading the checkpoint will report the missing file
    try:
        found = parse_json(file.read_text())
        wrong = [f"{key} {found.get(key)!r}" for key, value in _FORMATS.items() if found.get(key, value) != value]
    except (ValueError, AttributeError) as error:
        raise refused(file, error) from None
    if wrong:
        raise refused(file, ", ".join(wrong) + " (torch_dist and torch are read)")


def check_extra_states(state: Any, folder: Path) -> None:
    """Refuse a state of a Transformer Engine module that is more than plain data.

    Each module stores an `_extra_state` for FP8 and unpickles it without a restriction when it gets it back (TE 1 and
    2). Without FP8 it is empty, or a pickled None.

    Args:
        state: a loaded state dict; nested dicts are searched.

    Raises:
        UserError: naming the entry.
    """
    for name, value in state.items() if isinstance(state, dict) else ():
        if not str(name).endswith("_extra_state"):
            check_extra_states(value, folder)
            continue
        with _named(f"{folder}: {name}"):
            if isinstance(value, torch.Tensor) and value.numel():
                _PlainUnpickler(io.BytesIO(value.detach().cpu().numpy().tobytes())).load()
            elif isinstance(value, io.BytesIO):
                torch.load(io.BytesIO(value.getvalue()), weights_only=True)


def pickled_weights(folder: Path) -> list[str]:
    """Names of the files of a Hugging Face folder that hold weights as pickles."""
    return sorted(file.name for kind in ("bin", "pt", "pth", "ckpt") for file in folder.glob(f"*.{kind}"))


def load_hf_model(source: str | Path, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """A Hugging Face causal language model from safetensors, with transformers' own code for its architecture.

    Neither pickled weights nor Python files of the folder are used, and transformers never asks whether it may.

    Args:
        source: a local folder or a hub id.
        dtype: of the weights; default: as transformers does, float32.
        kwargs: handed to `from_pretrained`.

    Raises:
        UserError: the model has no safetensors, or needs code of its own.
    """
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    try:
        return load(source, torch_dtype=dtype, trust_remote_code=False, use_safetensors=True, **kwargs).eval()
    except (OSError, ValueError) as error:
        raise UserError(
            f"the model {source} cannot be loaded",
            expected="a folder or hub id with config.json and safetensors, of an architecture that transformers knows; "
            "pickled weights and remote code are not used",
            found=", ".join([*pickled_weights(Path(source)), f"{type(error).__name__}: {_one_line(error)}"]),
            do="give a folder that `python launch.py convert export` wrote, or a Qwen2.5 model as Qwen publishes it",
        ) from None
