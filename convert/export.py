"""NeMo checkpoint -> HF folder, with the config and tokenizer of the HF model it descends from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from convert import config as convert_config
from convert import hf as convert_hf
from convert.hf import CONFIG
from convert.nemo import HF, NeMoCheckpoint, is_checkpoint
from convert.output_folder import check_room, whole_or_nothing

log = logging.getLogger("launch")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_hf(checkpoint: Path, output: Path, like: Path | None = None, dtype: str | None = None) -> Path:
    """NeMo checkpoint -> HF folder that plain transformers loads, complete or not there at all.

    Args:
        checkpoint: an imported checkpoint, or runs/NAME/checkpoints/step-N; its optimizer state is not read.
        output: the HF folder to make.
        like: the HF model it came from: its config, generation config and tokenizer are taken over unchanged.
            Default: what `source_of` finds; a model trained from scratch has none and gets a config made from its own.
        dtype: "float32" or "bfloat16"; default: the source's torch_dtype, without a source the stored one.

    Raises:
        UserError: not a whole checkpoint, another architecture or tokenizer than its source, output not empty,
            disk too small.
    """
    model = NeMoCheckpoint(checkpoint)
    source = _hf_part(like) if like else source_of(checkpoint)
    config = _config_like(model, source) if source else _config_from_scratch(model)
    as_dtype = _dtype(dtype or config.get("torch_dtype") or config.get("dtype"), model.dtype)
    check_room(output, model.arch.num_parameters * as_dtype.itemsize)
    tensors = {name: tensor.to(as_dtype, copy=True) for name, tensor in model.tensors()}
    with whole_or_nothing(output) as building:
        convert_hf.write_weights(building, tensors)
        _write_assets(building, model, source, config, as_dtype)
    log.info("wrote %s: %s parameters, %s", output, f"{model.arch.num_parameters:,}", as_dtype)
    return output


def source_of(checkpoint: Path) -> Path | None:
    """The HF files a checkpoint descends from: its own hf/, or those of the checkpoint its run started from.

    Returns:
        a folder with config.json and the tokenizer; None for a model trained from scratch.

    Raises:
        UserError: the run started from a checkpoint that is no longer there.
    """
    if (checkpoint / HF / CONFIG).is_file():
        return checkpoint / HF
    run = checkpoint.resolve().parent.parent
    restored = _restored_from(run / "config.yaml")
    if restored is None:
        return None
    for start in (Path(restored), run.parent.parent / restored):
        if is_checkpoint(start):
            return source_of(start)
    raise UserError(
        f"{checkpoint} was trained from {restored}, which is not there",
        expected="the checkpoint it started from, with the HF config and tokenizer in its hf/",
        found="no such folder",
        do="--like DIR: the HF model that it started from",
    )


def _restored_from(config: Path) -> str | None:
    """resume.restore_config.path in a run's config.yaml."""
    import yaml

    if not config.is_file():
        return None
    resume = yaml.safe_load(config.read_text()).get("resume") or {}
    path = (resume.get("restore_config") or {}).get("path")
    return str(path) if path else None


def _hf_part(like: Path) -> Path:
    """`like` itself, or the hf/ of an imported checkpoint."""
    return like / HF if (like / HF / CONFIG).is_file() else convert_hf.resolve(str(like))


def _config_like(model: NeMoCheckpoint, source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / CONFIG).read_text())
    differences = model.arch.differences(convert_config.architecture(config))
    if differences:
        raise UserError(
            f"{model.path} is not a model like {source}",
            expected="the architecture of the HF model it started from",
            found=f"(checkpoint, source) {'; '.join(differences)}",
            do="--like DIR with the HF model this run started from, or correct the recipe and train again",
        )
    if (model.tokenizer / "tokenizer.json").is_file():
        _check_same_tokenizer(model.tokenizer, source)
    return config


def _check_same_tokenizer(trained: Path, source: Path) -> None:
    from data.tokenizer import fingerprint, load_tokenizer

    found, wanted = (fingerprint(load_tokenizer(folder.resolve())) for folder in (trained, source))
    if found != wanted:
        raise UserError(
            "the checkpoint was trained with another tokenizer than its source has",
            expected=f"fingerprint {wanted[:16]} ({source})",
            found=f"fingerprint {found[:16]} ({trained})",
            do="prepare the corpus with the base model's tokenizer and train again",
        )


def _config_from_scratch(model: NeMoCheckpoint) -> dict[str, Any]:
    """A Qwen2 config.json of the model's own numbers; bos and eos as Qwen2.5 base has them, both end-of-document."""
    from transformers import Qwen2Config

    from data.tokenizer import eod_id, load_tokenizer

    arch, end = model.arch, eod_id(load_tokenizer(model.tokenizer.resolve()))
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_heads,
        num_key_value_heads=arch.num_groups,
        vocab_size=arch.vocab_size,
        tie_word_embeddings=arch.tied,
        rms_norm_eps=arch.norm_eps,
        rope_theta=arch.rope_theta,
        max_position_embeddings=int(model.model["seq_length"]),
        initializer_range=float(model.model.get("init_method_std") or 0.02),
        use_sliding_window=False,
        bos_token_id=end,
        eos_token_id=end,
    )
    if arch.head_dim * arch.num_heads != arch.hidden_size:
        config.head_dim = arch.head_dim
    return config.to_dict()  # type: ignore[no-any-return]


def _write_assets(
    folder: Path, model: NeMoCheckpoint, source: Path | None, config: dict[str, Any], dtype: torch.dtype
) -> None:
    convert_hf.copy_assets(source or model.tokenizer, folder)
    name = str(dtype).removeprefix("torch.")
    if source is None:
        end = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
        (folder / convert_hf.GENERATION).write_text(json.dumps(end, indent=2) + "\n")
    key = "dtype" if "dtype" in config else "torch_dtype"
    if source is None or config.get(key) != name:
        (folder / CONFIG).write_text(json.dumps(config | {key: name}, indent=2, sort_keys=True) + "\n")


def _dtype(name: str | None, stored: torch.dtype) -> torch.dtype:
    if name is None:
        return stored
    if name not in _DTYPES:
        raise UserError("unknown dtype", expected=" or ".join(_DTYPES), found=repr(name), do="--dtype bfloat16")
    return _DTYPES[name]
