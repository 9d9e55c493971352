"""A Hugging Face folder as one GGUF file for llama.cpp, written and read back with llama.cpp's own `gguf` library."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

from common.errors import UserError

log = logging.getLogger("launch")
TYPES = ("bf16", "f16", "f32", "q8_0")
# the expressions by which llama.cpp knows how a byte-level BPE cuts text into words (llama-vocab.cpp)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def check_request(folder: Path, output: Path, kind: str) -> None:
    """Check what can be checked before torch is imported.

    Raises:
        UserError: no exported folder, an unknown type, an output that exists, or the `gguf` package is missing.
    """
    if kind not in TYPES:
        raise UserError("unknown type of weights", expected=" or ".join(TYPES), found=kind, do="--type bf16")
    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"no model in {folder}",
            expected="an exported Hugging Face folder with config.json and tokenizer.json",
            found="no such folder" if not folder.exists() else "a folder without them",
            do=f"python launch.py convert export RUN {folder}",
        )
    if output.exists():
        raise UserError(f"{output} exists", expected="a new file", found=output.name, do="remove it, or name another")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "the gguf package is not installed",
            expected="llama.cpp's library for GGUF files",
            found="no package gguf",
            do="pip install 'gguf==0.19.0'",
        )


def export_gguf(folder: Path, output: Path, kind: str = "bf16") -> Path:
    """Write `output` and compare every tensor in it with the folder's.

    Norms and biases stay in float32, as llama.cpp wants them; a tied output layer is left out, and llama.cpp takes the
    embedding instead.

    Args:
        folder: an exported Hugging Face Qwen2 folder.
        output: the file to write; it appears when it is complete.
        kind: one of `TYPES`.

    Raises:
        UserError: not a Qwen2 model with safetensors, one without a token that ends a text, or a tokenizer that
            llama.cpp does not know.
    """
    import gguf

    from convert.hf import HFFolder

    check_request(folder, output, kind)
    model = HFFolder(folder)
    split, eos = _find_pre_tokenizer(folder), _end_of_text(model)
    part = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        writer = gguf.GGUFWriter(part, "qwen2")
        _add_model(writer, model, output.stem, kind)
        _add_tokenizer(writer, folder, split, model.arch.vocab_size, eos)
        for name, numbers, stored in _converted(model, kind):
            writer.add_tensor(name, numbers, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        error = _largest_error(part, model)
        _check_tokenizer(part, folder, eos)
        part.rename(output)
    finally:
        part.unlink(missing_ok=True)
    size = output.stat().st_size / 2**20
    log.info("wrote %s: %.0f MiB, %s, largest difference of a weight %.2g", output, size, kind, error)
    return output


def _converted(model: Any, kind: str) -> Any:
    """(GGUF name, array, stored type) of every tensor of the model."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.arch.num_layers)
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    for name, tensor in model.tensors():
        numbers = tensor.float().numpy()
        stored = gguf.GGMLQuantizationType.F32 if numbers.ndim == 1 else wanted
        yield names.get_name(name, try_suffixes=(".weight", ".bias")), gguf.quantize(numbers, stored), stored


def _add_model(writer: Any, model: Any, name: str, kind: str) -> None:
    """Shape and constants, by the keys of llama.cpp's architecture `qwen2`."""
    import gguf

    arch = model.arch
    if arch.head_dim != arch.hidden_size // arch.num_attention_heads:
        raise UserError(
            "llama.cpp's qwen2 has no head width of its own",
            expected=f"hidden size / heads = {arch.hidden_size // arch.num_attention_heads}",
            found=f"head_dim {arch.head_dim}",
            do="use the export in transformers or vLLM",
        )
    writer.add_name(name)
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(int(model.config["max_position_embeddings"]))
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.ffn_hidden_size)
    writer.add_head_count(arch.num_attention_heads)
    writer.add_head_count_kv(arch.num_query_groups)
    writer.add_rope_freq_base(arch.rope_theta)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _end_of_text(model: Any) -> int:
    """`eos_token_id` of config.json; of a list, which GGUF has no place for, the first.

    Raises:
        UserError: it is missing or no id of the vocabulary: llama.cpp would never end a text.
    """
    ids = model.config.get("eos_token_id")
    first = ids[0] if isinstance(ids, list) and ids else ids
    if isinstance(first, int) and not isinstance(first, bool) and 0 <= first < model.arch.vocab_size:
        return first
    raise UserError(
        f"{model.path} has no token that ends a text",
        expected=f"eos_token_id in config.json, from 0 to {model.arch.vocab_size - 1:,}",
        found=repr(ids),
        do="copy it from the base model's config.json",
    )


def _add_tokenizer(writer: Any, folder: Path, split: str, vocab_size: int, eos: int) -> None:
    """Tokens, merges, special tokens and chat template; ids that no token has are unused ones."""
    import gguf

    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = {number: (word, gguf.TokenType.NORMAL) for word, number in tokenizer["model"]["vocab"].items()}
    for added in tokenizer.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        words[added["id"]] = (added["content"], kind)
    tokens = [words.get(number, (f"[PAD{number}]", gguf.TokenType.UNUSED)) for number in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([word for word, _ in tokens])
    writer.add_token_types([kind for _, kind in tokens])
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size)
    special.special_token_ids["eos"] = eos  # the library prefers tokenizer_config.json, and takes none from a list
    special.add_special_token.pop("bos", None)
    special.add_to_gguf(writer, quiet=True)
    writer.add_add_bos_token(False)  # Qwen's tokenizer puts nothing in front of a text


def _find_pre_tokenizer(folder: Path) -> str:
    """llama.cpp's name for how the tokenizer cuts text into words.

    Raises:
        UserError: llama.cpp has none that is the same.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    parts = tokenizer.get("pre_tokenizer") or {}
    steps = parts.get("pretokenizers", [parts])
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    # llama.cpp reads text as it is: NFC changes only text that is not in that form, which little text is not
    if tokenizer["model"].get("type") == "BPE" and normalizer in (None, "NFC") and _cuts_as_qwen2(steps):
        return "qwen2"
    patterns = [step.get("pattern", {}).get("Regex") or step.get("type") for step in steps]
    raise UserError(
        "llama.cpp does not know this tokenizer",
        expected="a byte-level BPE that cuts text as Qwen2's does, after NFC",
        found=f"{tokenizer['model'].get('type')} with {patterns} after {normalizer}",
        do="use the export in transformers or vLLM",
    )


def _cuts_as_qwen2(steps: list[dict[str, Any]]) -> bool:
    """Qwen2's expression, each match a word, and then bytes."""
    wanted: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]
    return len(steps) == 2 and all(
        step.get(key) == value for step, other in zip(steps, wanted, strict=True) for key, value in other.items()
    )


def _check_tokenizer(file: Path, folder: Path, eos: int) -> None:
    """Read the file back: the end of a text, and which tokens are control tokens.

    Raises:
        UserError: they are not those of the folder.
    """
    import gguf

    fields = gguf.GGUFReader(file).fields
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {added["id"] for added in tokenizer.get("added_tokens", []) if added["special"]}
    kinds = fields["tokenizer.ggml.token_type"].contents()
    found = {number for number, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL}
    end = fields["tokenizer.ggml.eos_token_id"].contents()
    if end != eos or found != special:
        raise UserError(
            "the GGUF file has another end of text or other control tokens",
            expected=f"{eos} and {len(special)} control tokens",
            found=f"{end} and {len(found)}",
            do="report it, with the version of the gguf package",
        )


def _largest_error(file: Path, model: Any) -> float:
    """Read the file back: the largest difference from the folder's weights.

    Raises:
        UserError: names or shapes are not those of the model.
    """
    import gguf
    import numpy

    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, model.arch.num_layers)
    largest = 0.0
    for name, tensor in model.tensors():
        found = written.pop(str(names.get_name(name, try_suffixes=(".weight", ".bias"))))
        numbers = gguf.dequantize(found.data, found.tensor_type).reshape(tensor.shape)
        largest = max(largest, float(numpy.abs(numbers - tensor.float().numpy()).max()))
    if written:
        raise UserError("the GGUF file has other tensors", expected="none", found=", ".join(written), do="report it")
    return largest
