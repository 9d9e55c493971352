"""What an HF config.json says, and whether Megatron's Qwen2 computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.errors import UserError
from convert.map import Architecture


def check_supported(config: dict[str, Any], path: Path) -> None:
    """Refuse what Megatron's Qwen2 would compute differently.

    Raises:
        UserError: another architecture, quantised weights, scaled RoPE, a sliding window in use, another activation.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rows = (
        ("architecture", config.get("model_type") == "qwen2", "model_type qwen2", config.get("model_type")),
        ("quantisation", "quantization_config" not in config, "unquantised weights", "quantization_config"),
        ("rope", rope.get("rope_type", rope.get("type", "default")) == "default", "rope_scaling null", rope),
        ("attention", not config.get("use_sliding_window"), "use_sliding_window false", "a sliding window in use"),
        ("activation", config.get("hidden_act", "silu") == "silu", "hidden_act silu", config.get("hidden_act")),
    )
    for name, fine, expected, found in rows:
        if not fine:
            raise UserError(
                f"{path}: its {name} is not one this project can train",
                expected=f"{expected} (Qwen2 and Qwen2.5, any size)",
                found=str(found),
                do="give a Qwen2.5 base model as Qwen publishes it, e.g. Qwen/Qwen2.5-0.5B",
            )


def architecture(config: dict[str, Any]) -> Architecture:
    """The sizes in a config.json; a key that is not there has the default of HF's Qwen2Config."""
    from transformers import Qwen2Config

    full = Qwen2Config(**{k: v for k, v in config.items() if k not in ("model_type", "transformers_version")})
    nested = (config.get("rope_parameters") or {}).get("rope_theta")  # transformers 5
    return Architecture(
        num_layers=full.num_hidden_layers,
        hidden_size=full.hidden_size,
        ffn_hidden_size=full.intermediate_size,
        num_heads=full.num_attention_heads,
        num_groups=full.num_key_value_heads,
        head_dim=getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads,
        vocab_size=full.vocab_size,
        tied=full.tie_word_embeddings,
        norm_eps=float(full.rms_norm_eps),
        rope_theta=float(nested or full.rope_theta),
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        UserError: not there, or no JSON object.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read",
            expected="an HF model folder: config.json, safetensors, tokenizer files",
            found="no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            do="give the folder that save_pretrained() or huggingface-cli download wrote",
        ) from None
    return dict(content)
