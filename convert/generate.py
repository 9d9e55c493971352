"""Generate text with an exported model, in plain transformers as any user of the export would."""

from __future__ import annotations

from pathlib import Path

from common.commands import launch_command
from common.errors import UserError
from common.rundir import existing_run


def generate(model: Path, prompt: str, tokens: int) -> str:
    """Continue a prompt greedily, with a repetition penalty of 1.2.

    Args:
        model: an exported Hugging Face folder.
        tokens: how many tokens to add at most.

    Returns:
        prompt and continuation.

    Raises:
        UserError: `model` is not a Hugging Face folder, or has no safetensors.
    """
    _check(model, tokens)
    import torch

    from data.tokenizer import load_tokenizer
    from training.safe_load import load_hf_model

    tokenizer = load_tokenizer(str(model))
    network = load_hf_model(model)
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = network.generate(**ids, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.2)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def _check(model: Path, tokens: int) -> None:
    """Check what can be checked before torch is imported, which takes seconds."""
    if tokens < 1:
        raise UserError("nothing to generate", expected="1 token or more", found=str(tokens), do="--tokens 40")
    if (model / "config.json").is_file():
        return
    run, folder = existing_run(model), f"models/{model.name}"
    export = launch_command("convert", "export", str(model) if run else "RUN", folder if run else str(model))
    raise UserError(
        f"no model in {model}",
        expected="a Hugging Face folder with config.json",
        found="a run" if run else "no such folder" if not model.exists() else "a folder without config.json",
        do=export + (f", then generate with {folder}" if run else ""),
    )
