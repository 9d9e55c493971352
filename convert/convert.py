"""HF Qwen2.5 folder -> NeMo checkpoint -> HF folder, and the proof that nothing changed on the way.

Both directions run on any machine's CPU and only rearrange tensors (convert/map.py): every value is
kept to the last bit, in the dtype it is stored in. Not built on NeMo's connectors, which untie tied
models, leave the norms at their initial values without Transformer Engine, and rewrite the HF config
(nemo_toolkit 2.3.3, tests/convert/test_convert.py shows each).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

from common.errors import UserError
from convert import hf as convert_hf
from convert import nemo as convert_nemo
from convert.export import export_hf, source_of
from convert.hf import HFFolder
from convert.map import Architecture, to_megatron
from convert.nemo import HF, NeMoCheckpoint, is_checkpoint
from convert.output_folder import check_room, whole_or_nothing
from convert.verify import Verification, open_model, summary, verify

__all__ = ["Verification", "ensure_imported", "export_hf", "facts", "import_hf", "source_of", "summary", "verify"]

log = logging.getLogger("launch")
RECORD = "import.json"


def import_hf(source: str, output: Path) -> Path:
    """HF model -> NeMo checkpoint, complete or not there at all.

    Args:
        source: a folder or hub id of a Qwen2 or Qwen2.5 model, fp32 or bf16 safetensors; the dtype is kept.
        output: the checkpoint folder to make.

    Raises:
        UserError: another architecture, incomplete or quantised weights, no tokenizer, hub out of reach,
            output not empty, disk too small.
    """
    model = HFFolder(convert_hf.resolve(source))
    return _import(source, model, convert_hf.fingerprint(model.path), output)


def _import(source: str, model: HFFolder, fingerprint: str, output: Path) -> Path:
    _check_tokenizer(model.path, model.arch)
    check_room(output, model.num_bytes)
    log.info("import %s: %s parameters, %s", source, f"{model.arch.num_parameters:,}", model.dtype)
    config = convert_nemo.nemo_config(
        model.arch,
        int(model.config.get("max_position_embeddings", 32768)),
        model.dtype,
        float(model.config.get("initializer_range", 0.02)),
    )
    with whole_or_nothing(output) as building:
        convert_nemo.write_weights(building / "weights", model.arch.num_layers, to_megatron(model.arch, model.tensor))
        with convert_hf.tokenizer_alone(model.path) as tokenizer:
            convert_nemo.write_context(building / "context", config, tokenizer)
        convert_hf.copy_assets(model.path, building / HF)
        _write_record(building, source, fingerprint, model)
    log.info("wrote %s", output)
    return output


def ensure_imported(base: str, cache: Path) -> Path:
    """The NeMo checkpoint of `base`, imported on first use and found again by the content of its files.

    Args:
        base: an HF folder or hub id; a NeMo checkpoint is returned as it is.
        cache: the folder that keeps imported checkpoints.

    Raises:
        UserError: as `import_hf`.
    """
    if is_checkpoint(Path(base)):
        return NeMoCheckpoint(Path(base)).path
    model = HFFolder(convert_hf.resolve(base))
    fingerprint = convert_hf.fingerprint(model.path)
    kept = cache / f"{base.rstrip('/').split('/')[-1]}-{fingerprint[:16]}"
    if _kept_whole(kept, fingerprint):
        log.info("base %s: imported before, %s", base, kept)
        return kept
    if kept.exists():
        log.warning("base %s: %s is not whole any more and is made again", base, kept)
        shutil.rmtree(kept)
    return _import(base, model, fingerprint, kept)


def facts(model: Path | str) -> Architecture:
    """Sizes, tie, norm epsilon and RoPE base of an HF folder, hub id or NeMo checkpoint, without reading weights."""
    return open_model(model).arch


def _check_tokenizer(folder: Path, arch: Architecture) -> None:
    from data.tokenizer import load_tokenizer, vocab_size

    convert_hf.assets(folder)
    size = vocab_size(load_tokenizer(folder.resolve()))
    if size > arch.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer is larger than the embedding table",
            expected=f"at most {arch.vocab_size} ids (vocab_size in config.json)",
            found=f"{size} ids",
            do="copy the tokenizer's files of the same model into the folder",
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


def _kept_whole(folder: Path, fingerprint: str) -> bool:
    """The imported checkpoint is there, of this source, with every file of the size it was written with."""
    try:
        record = json.loads((folder / RECORD).read_text())
        sizes = {name: (folder / name).stat().st_size for name in record["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return bool(record["fingerprint"] == fingerprint and sizes == record["files"])
