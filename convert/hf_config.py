"""What a Hugging Face config.json says, and whether Megatron's Qwen2 computes the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common.errors import UserError
from common.json_files import parse_json
from convert.tensor_map import Architecture


def check_supported(config: dict[str, Any], path: Path) -> None:
    """Refuse a model that Megatron's Qwen2 would compute differently.

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
    for name, supported, expected, found in rows:
        if not supported:
            raise UserError(
                f"{path}: this model's {name} is not supported",
                expected=f"{expected} (Qwen2 and Qwen2.5, any size)",
                found=str(found),
                do="use a Qwen2.5 base model as Qwen publishes it, e.g. Qwen/Qwen2.5-0.5B",
            )


def read_architecture(config: dict[str, Any]) -> Architecture:
    """The architecture that a config.json describes; a missing key has the default of transformers' Qwen2Config."""
    from transformers import Qwen2Config

    values = {k: v for k, v in config.items() if k not in ("model_type", "transformers_version")}
    full = Qwen2Config(**values)
    rope_theta = (config.get("rope_parameters") or {}).get("rope_theta")  # transformers 5 nests it
    return Architecture(
        num_layers=full.num_hidden_layers,
        hidden_size=full.hidden_size,
        ffn_hidden_size=full.intermediate_size,
        num_attention_heads=full.num_attention_heads,
        num_query_groups=full.num_key_value_heads,
        head_dim=getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads,
        vocab_size=full.vocab_size,
        tied=full.tie_word_embeddings,
        norm_eps=float(full.rms_norm_eps),
        rope_theta=float(rope_theta or full.rope_theta),
    )


def make_config(arch: Architecture, *, max_positions: int, init_std: float, end_of_document: int) -> dict[str, Any]:
    """A Qwen2 config.json for a model without a Hugging Face source.

    Args:
        max_positions: longest sequence, in tokens.
        init_std: standard deviation of freshly initialised weights.
        end_of_document: token id that is both bos and eos, as in Qwen2.5's base models.
    """
    from transformers import Qwen2Config

    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_query_groups,
        vocab_size=arch.vocab_size,
        tie_word_embeddings=arch.tied,
        rms_norm_eps=arch.norm_eps,
        rope_theta=arch.rope_theta,
        max_position_embeddings=max_positions,
        initializer_range=init_std,
        use_sliding_window=False,
        bos_token_id=end_of_document,
        eos_token_id=end_of_document,
    )
    if arch.head_dim * arch.num_attention_heads != arch.hidden_size:
        config.head_dim = arch.head_dim
    return dict(config.to_dict())


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model folder.

    Raises:
        UserError: the file does not exist or holds no JSON object.
    """
    try:
        content = dict(parse_json(file.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read",
            expected="a Hugging Face model folder: config.json, safetensors, tokenizer files",
            found="no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}",
            do="give the folder that save_pretrained() or huggingface-cli download wrote",
        ) from None
    return content
