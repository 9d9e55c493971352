"""Import a Hugging Face Qwen2 or Qwen2.5 model as a NeMo checkpoint, on the CPU of any machine.

Import and export only rearrange tensors (convert/tensor_map.py): every value is kept to the last bit, in the dtype
it is stored in. NeMo's own connectors are not used, because they untie tied models, leave the norms at their initial
values without Transformer Engine, and rewrite the Hugging Face config (nemo_toolkit 2.3.3,
tests/convert/test_convert.py shows each).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
from pathlib import Path

from common.errors import UserError
from common.json_files import parse_json
from convert.hf import (
    HFFolder,
    copy_assets,
    copy_tokenizer_to_temp,
    fetch_model,
    fingerprint_model,
    list_assets,
    pickles_as_safetensors,
)
from convert.nemo import HF, NeMoCheckpoint, is_checkpoint, nemo_config, write_context, write_weights
from convert.output_folder import check_output, complete_or_absent
from convert.tensor_map import Architecture, to_megatron

log = logging.getLogger("launch")
RECORD = "import.json"


def import_hf(source: str, output: Path, *, trust_pickle: bool = False) -> Path:
    """Write the NeMo checkpoint of a Hugging Face model; on failure no output is left behind.

    Args:
        source: a folder or hub id of a Qwen2 or Qwen2.5 model, fp32 or bf16 safetensors; the dtype is kept.
        output: the checkpoint folder to create.
        trust_pickle: read weights from pytorch_model*.bin if there are no safetensors.

    Returns:
        `output`.

    Raises:
        UserError: another architecture, pickled, incomplete or quantised weights, no tokenizer, hub out of reach,
            output not empty, disk too small.
    """
    folder = fetch_model(source, pickles=trust_pickle)
    with contextlib.ExitStack() as stack:
        if trust_pickle and not any(folder.glob("*.safetensors")):
            folder = stack.enter_context(pickles_as_safetensors(folder))
        model = HFFolder(folder)
        return _import(source, model, fingerprint_model(model.path), output)


def _import(source: str, model: HFFolder, fingerprint: str, output: Path) -> Path:
    _check_tokenizer(model.path, model.arch)
    check_output(output, model.num_bytes)
    log.info("import %s: %s parameters, %s", source, f"{model.arch.num_parameters:,}", model.dtype)
    config = nemo_config(
        model.arch,
        int(model.config.get("max_position_embeddings", 32768)),
        model.dtype,
        float(model.config.get("initializer_range", 0.02)),
    )
    with complete_or_absent(output) as building:
        write_weights(building / "weights", model.arch.num_layers, to_megatron(model.arch, model.tensor))
        with copy_tokenizer_to_temp(model.path) as tokenizer:
            write_context(building / "context", config, tokenizer)
        copy_assets(model.path, building / HF)
        _write_record(building, source, fingerprint, model)
    log.info("wrote %s", output)
    return output


def import_once(base: str, cache: Path) -> Path:
    """The NeMo checkpoint of `base`: imported on first use, afterwards found by the fingerprint of its files.

    Args:
        base: a Hugging Face folder or hub id; a NeMo checkpoint is returned as it is.
        cache: the folder that keeps imported checkpoints.

    Raises:
        UserError: as `import_hf`.
    """
    if is_checkpoint(Path(base)):
        return NeMoCheckpoint(Path(base)).path
    model = HFFolder(fetch_model(base))
    fingerprint = fingerprint_model(model.path)
    cached = cache / f"{base.rstrip('/').split('/')[-1]}-{fingerprint[:16]}"
    if _is_complete(cached, fingerprint):
        log.info("base %s: imported before as %s", base, cached)
        return cached
    if cached.exists():
        log.warning("base %s: %s is incomplete or changed; importing it again", base, cached)
        shutil.rmtree(cached)
    return _import(base, model, fingerprint, cached)


def _check_tokenizer(folder: Path, arch: Architecture) -> None:
    from data.tokenizer import load_tokenizer, vocab_size

    list_assets(folder)  # raises where there is no tokenizer
    size = vocab_size(load_tokenizer(folder.resolve()))
    if size > arch.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer is larger than the embedding table",
            expected=f"at most {arch.vocab_size} ids (vocab_size in config.json)",
            found=f"{size} ids",
            do="copy the tokenizer files of the same model into the folder",
        )


def _write_record(folder: Path, source: str, fingerprint: str, model: HFFolder) -> None:
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    record = {
        "source": source,
        "fingerprint": fingerprint,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_parameters": model.arch.num_parameters,
        "architecture": dataclasses.asdict(model.arch),
        "files": files,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def _is_complete(folder: Path, fingerprint: str) -> bool:
    """The folder is an import of this source, and every file still has the size it was written with."""
    try:
        record = parse_json((folder / RECORD).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(record["fingerprint"] == fingerprint and sizes == record["files"])
