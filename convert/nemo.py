"""Reading and writing a NeMo checkpoint folder on the CPU, without a trainer or a process group.

    weights/     the files of torch.distributed.checkpoint (Megatron's torch_dist), plus metadata.json and common.pt
    context/     model.yaml (the model's configuration), io.json (NeMo's own format), tokenizer/
    hf/          of imported checkpoints: config.json, generation_config.json and tokenizer of the source, unchanged
    import.json  of imported checkpoints: source, fingerprint, size of every file

Optimizer state is never read, and every pickle is read as data (training/safe_load.py).
Layout as written by nemo_toolkit 2.3 with megatron-core 0.12 and 0.13.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.rundir import UNFINISHED
from common.small_files import parse_yaml, read_small_file
from convert.tensor_map import Architecture, Row, megatron_shapes, rows, to_hf
from training.safe_load import data_only

PREFIX, HF = "module.", "hf"
# TE gives these modules an FP8 state. Megatron's loader expects the keys on a GPU even where there is no such state.
_FINAL_STATE = "decoder.final_layernorm._extra_state/shard_0_1"
_MODULES_WITH_STATE = (  # in every layer
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


class NeMoCheckpoint:
    """An imported or trained checkpoint. Opening it checks names and shapes; tensors are read on demand.

    Raises:
        UserError: not a checkpoint, an incomplete one, or a model that differs from its model.yaml.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.weights = path, path / "weights"
        _check_complete(path)
        self.model = _read_model_yaml(path)
        self.arch = read_architecture(self.model)
        self._stored = self._read_metadata()
        self._check_tensors()

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest dtype of the stored weights."""
        found = {self._stored[PREFIX + row.megatron].properties.dtype for row in rows(self.arch)}
        return torch.bfloat16 if torch.bfloat16 in found else torch.float32

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer that it was imported or trained with."""
        return self.path / "context" / "tokenizer"

    def tensor(self, name: str) -> torch.Tensor:
        """One Megatron tensor, all layers stacked, in its stored dtype."""
        import torch.distributed.checkpoint as dcp

        meta = self._stored[PREFIX + name]
        target = {PREFIX + name: torch.empty(meta.size, dtype=meta.properties.dtype)}
        with data_only(self.path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "torch.distributed is unavailable": loading without it is intended
            dcp.load(target, checkpoint_id=self.weights, no_dist=True)
        return target[PREFIX + name]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF name, tensor) in the order of `hf_shapes`."""
        return to_hf(self.arch, self.tensor)

    def _read_metadata(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        with data_only(self.path):
            return dict(FileSystemReader(self.weights).read_metadata().state_dict_metadata)

    def _check_tensors(self) -> None:
        """Exactly the tensors of the architecture, each of its shape; vocabulary rows may be padded."""
        wanted = {PREFIX + name: shape for name, shape in megatron_shapes(self.arch).items()}
        stored = [name for name in self._stored if name.startswith(PREFIX) and "_extra_state" not in name]
        problems = [f"missing {name}" for name in wanted if name not in self._stored]
        problems += [f"unknown {name}" for name in stored if name not in wanted]
        for row in rows(self.arch):
            name = PREFIX + row.megatron
            if name in self._stored and not _shape_matches(row, tuple(self._stored[name].size), wanted[name]):
                problems.append(f"{name} is {list(self._stored[name].size)}, not {list(wanted[name])}")
        if problems:
            raise UserError(
                f"{self.path}: the weights are not what context/model.yaml describes",
                expected=f"the {len(wanted)} tensors of a {'tied' if self.arch.tied else 'untied'} Qwen2 model",
                found="; ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else ""),
                do="convert a checkpoint of a Qwen2.5 recipe; LoRA, MoE and other model families are not supported",
            )


def is_checkpoint(path: Path) -> bool:
    """Whether the folder looks like a NeMo checkpoint, complete or not."""
    return (path / "weights").is_dir() or (path / "context").is_dir()


def read_architecture(model: dict[str, Any]) -> Architecture:
    """The architecture that the `config` of context/model.yaml describes."""
    heads = int(model["num_attention_heads"])
    return Architecture(
        num_layers=int(model["num_layers"]),
        hidden_size=int(model["hidden_size"]),
        ffn_hidden_size=int(model["ffn_hidden_size"]),
        num_attention_heads=heads,
        num_query_groups=int(model["num_query_groups"] or heads),
        head_dim=int(model["kv_channels"] or model["hidden_size"] // heads),
        vocab_size=int(model["vocab_size"]),
        tied=bool(model["share_embeddings_and_output_weights"]),
        norm_eps=float(model["layernorm_epsilon"]),
        rope_theta=float(model["rotary_base"]),
    )


def _shape_matches(row: Row, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    if row.kind == "vocab":
        return found[0] >= wanted[0] and found[1:] == wanted[1:]
    return found == wanted


def _check_complete(path: Path) -> None:
    marker = path.with_name(path.name + UNFINISHED)
    if marker.exists():
        raise _incomplete(path, f"{marker.name} beside it, so its writing was interrupted")
    for name in ("weights/metadata.json", "weights/.metadata", "context/model.yaml"):
        if not (path / name).is_file():
            raise _incomplete(path, "no such folder" if not path.exists() else f"no {name}")


def _incomplete(path: Path, found: str) -> UserError:
    return UserError(
        f"{path} is not a complete NeMo checkpoint",
        expected="a folder with weights/ and context/ (runs/NAME/checkpoints/step-N, or what `convert import` wrote)",
        found=found,
        do="give another checkpoint: ls runs/NAME/checkpoints lists them",
    )


def _read_model_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        return dict(parse_yaml(read_small_file(path / "context" / "model.yaml"))["config"])
    except (yaml.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
        raise _incomplete(path, f"context/model.yaml: {type(error).__name__}: {error}") from None


def write_weights(folder: Path, num_layers: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write `weights/` of a checkpoint in Megatron's torch_dist format, with empty FP8 states for TE.

    Holds the model in memory once. Training can read the result under any parallel layout.

    Args:
        tensors: (Megatron name without PREFIX, stacked tensor).
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    state: dict[str, Any] = {PREFIX + name: tensor for name, tensor in tensors}
    state[PREFIX + _FINAL_STATE] = [None]
    for module in _MODULES_WITH_STATE:
        for layer in range(num_layers):
            state[f"{PREFIX}decoder.layers.{module}._extra_state/shard_{layer}_{num_layers}"] = [None]
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
    torch.save({}, folder / "common.pt")
    versions = {
        "sharded_backend": "torch_dist",
        "common_backend": "torch",
        "sharded_backend_version": 1,
        "common_backend_version": 1,
    }
    (folder / "metadata.json").write_text(json.dumps(versions))


def nemo_config(arch: Architecture, seq_length: int, dtype: torch.dtype, init_std: float = 0.02) -> Any:
    """NeMo's Qwen2Config of this architecture, tied or untied as it says (NeMo's default is untied).

    Args:
        seq_length: the longest sequence the model was made for, in tokens.
        init_std: standard deviation of freshly initialised weights.
    """
    from nemo.collections.llm.gpt.model.qwen2 import Qwen2Config

    return Qwen2Config(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_query_groups,
        kv_channels=arch.head_dim,
        vocab_size=arch.vocab_size,
        share_embeddings_and_output_weights=arch.tied,
        layernorm_epsilon=arch.norm_eps,
        rotary_base=arch.rope_theta,
        seq_length=seq_length,
        init_method_std=init_std,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def write_context(folder: Path, config: Any, tokenizer: Path) -> None:
    """Write `context/` as NeMo's own checkpoints have it, for AutoResume and NeMo's loaders.

    Args:
        tokenizer: a folder named `tokenizer` that holds nothing else, because NeMo copies all of it.
    """
    from nemo import lightning as nl
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.collections.llm.gpt.model.qwen2 import Qwen2Model
    from nemo.lightning.io.pl import TrainerContext

    model = Qwen2Model(config, tokenizer=AutoTokenizer(str(tokenizer), use_fast=True))
    trainer = nl.Trainer(accelerator="cpu", devices=1, strategy=nl.MegatronStrategy(), logger=False)
    folder.mkdir(parents=True)
    TrainerContext(model=model, trainer=trainer, extra={}).io_dump(folder, yaml_attrs=["model"])
