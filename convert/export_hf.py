"""Export a NeMo checkpoint as a Hugging Face folder, with the config and tokenizer of the model it started from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.small_files import parse_yaml, read_small_file
from convert.hf import CONFIG, GENERATION, copy_assets, fetch_model, write_weights
from convert.hf_config import make_config, read_architecture, read_json
from convert.nemo import HF, NeMoCheckpoint, is_checkpoint
from convert.output_folder import check_output, complete_or_absent

log = logging.getLogger("launch")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_hf(checkpoint: Path, output: Path, like: Path | None = None, dtype: str | None = None) -> Path:
    """Write a Hugging Face folder that plain transformers loads; on failure no output is left behind.

    Args:
        checkpoint: an imported checkpoint, or runs/NAME/checkpoints/step-N; its optimizer state is not read.
        output: the folder to create.
        like: the Hugging Face model that the run started from: its config, generation config and tokenizer are copied
            unchanged. Default: what `find_source` finds; a model trained from scratch has none and gets a new config.
        dtype: "float32" or "bfloat16"; default: the source's torch_dtype, without a source the stored one.

    Returns:
        `output`.

    Raises:
        UserError: not a complete checkpoint, another architecture or tokenizer than its source, output not empty,
            disk too small.
    """
    model = NeMoCheckpoint(checkpoint)
    source = _hf_files(like) if like else find_source(checkpoint)
    config = _config_of_source(model, source) if source else _new_config(model)
    as_dtype = _parse_dtype(dtype or config.get("torch_dtype") or config.get("dtype"), model.dtype)
    check_output(output, model.arch.num_parameters * as_dtype.itemsize)
    tensors = {name: tensor.to(as_dtype, copy=True) for name, tensor in model.tensors()}
    with complete_or_absent(output) as building:
        write_weights(building, tensors)
        _write_assets(building, model, source, config, as_dtype)
    log.info("wrote %s: %s parameters, %s", output, f"{model.arch.num_parameters:,}", as_dtype)
    return output


def find_source(checkpoint: Path) -> Path | None:
    """The Hugging Face files a checkpoint descends from: its own hf/, or those of the checkpoint its run started from.

    Returns:
        a folder with config.json and the tokenizer; None for a model trained from scratch.

    Raises:
        UserError: the checkpoint that the run started from no longer exists.
    """
    if (checkpoint / HF / CONFIG).is_file():
        return checkpoint / HF
    run = checkpoint.resolve().parent.parent
    restored = _restored_from(run / "config.yaml")
    if restored is None:
        return None
    for start in (Path(restored), run.parent.parent / restored):
        if is_checkpoint(start):
            return find_source(start)
    raise UserError(
        f"{checkpoint} was trained from {restored}, which does not exist any more",
        expected="the checkpoint it started from, with the Hugging Face config and tokenizer in its hf/",
        found="no such folder",
        do="--like DIR, where DIR is the Hugging Face model that the run started from",
    )


def _restored_from(config: Path) -> str | None:
    """resume.restore_config.path in a run's config.yaml."""
    if not config.is_file():
        return None
    resume = parse_yaml(read_small_file(config)).get("resume") or {}
    path = (resume.get("restore_config") or {}).get("path")
    return str(path) if path else None


def _hf_files(like: Path) -> Path:
    """`like` itself, or the hf/ of an imported checkpoint."""
    return like / HF if (like / HF / CONFIG).is_file() else fetch_model(str(like))


def _config_of_source(model: NeMoCheckpoint, source: Path) -> dict[str, Any]:
    config = read_json(source / CONFIG)
    differences = model.arch.differences(read_architecture(config))
    if differences:
        raise UserError(
            f"{model.path} has another architecture than {source}",
            expected="the architecture of the Hugging Face model it started from",
            found=f"(checkpoint, source) {'; '.join(differences)}",
            do="--like DIR with the Hugging Face model this run started from, or correct the recipe and train again",
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


def _new_config(model: NeMoCheckpoint) -> dict[str, Any]:
    from data.tokenizer import eod_id, load_tokenizer

    return make_config(
        model.arch,
        max_positions=int(model.model["seq_length"]),
        init_std=float(model.model.get("init_method_std") or 0.02),
        end_of_document=eod_id(load_tokenizer(model.tokenizer.resolve())),
    )


def _write_assets(
    folder: Path, model: NeMoCheckpoint, source: Path | None, config: dict[str, Any], dtype: torch.dtype
) -> None:
    """Copy the source's files unchanged; config.json is written anew only where its dtype or the file is missing."""
    copy_assets(source or model.tokenizer, folder)
    name = str(dtype).removeprefix("torch.")
    if source is None:
        ids = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
        (folder / GENERATION).write_text(json.dumps(ids, indent=2) + "\n")
    key = "dtype" if "dtype" in config else "torch_dtype"
    if source is None or config.get(key) != name:
        (folder / CONFIG).write_text(json.dumps(config | {key: name}, indent=2, sort_keys=True) + "\n")


def _parse_dtype(name: str | None, stored: torch.dtype) -> torch.dtype:
    if name is None:
        return stored
    if name not in _DTYPES:
        raise UserError("unknown dtype", expected=" or ".join(_DTYPES), found=repr(name), do="--dtype bfloat16")
    return _DTYPES[name]
