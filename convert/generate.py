"""Generate text with an exported model, in plain transformers as any user of the export would."""

from __future__ import annotations

from pathlib import Path

from common.errors import UserError


def generate(model: Path, prompt: str, tokens: int) -> str:
    """Continue a prompt greedily, with a repetition penalty of 1.2.

    Args:
        model: an exported Hugging Face folder.
        tokens: how many tokens to add at most.

    Returns:
        prompt and continuation.

    Raises:
        UserError: `model` is not a Hugging Face folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from data.tokenizer import load_tokenizer

    if not (model / "config.json").is_file():
        raise UserError(
            f"no model in {model}",
            expected="a Hugging Face folder with config.json",
            found="no such folder" if not model.exists() else "a folder without config.json",
            do=f"python launch.py convert export NAME {model}",
        )
    tokenizer = load_tokenizer(str(model))
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = network.generate(**ids, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.2)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
