"""A trained run as a Hugging Face folder, proven equal to its checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.rundir import RunDir

if TYPE_CHECKING:
    from convert.verify import Verification

log = logging.getLogger("launch")


def export(source: Path, output: Path, like: Path | None = None) -> Verification:
    """Export and compare what was written with the checkpoint; a run keeps the result as export.json.

    Args:
        source: a run (its newest whole checkpoint), or a checkpoint folder.
        output: the HF folder to make.
        like: the HF model whose config and tokenizer files are taken over; default: the one the run started from.

    Raises:
        UserError: no whole checkpoint, or the output is not empty.
    """
    from convert import convert
    from convert import verify as convert_verify

    checkpoint = newest(source)
    convert.export_hf(checkpoint, output, like)
    result = convert_verify.verify(checkpoint, output)
    row = {
        "checkpoint": str(checkpoint),
        "output": str(output),
        "max_abs_logits": result.logit_difference,
        "max_abs_parameters": result.parameter_difference,
        "bound": result.tolerance,
        "dtype": str(result.precision).removeprefix("torch."),
        "ok": result.ok,
    }
    if checkpoint.parent.name == "checkpoints":
        run = RunDir(checkpoint.parents[1].name, checkpoint.parents[2])
        run.export.write_text(json.dumps(row, indent=1) + "\n")
    return result


def newest(source: Path) -> Path:
    """The checkpoint meant by a run folder or a checkpoint folder."""
    if (source / "weights").is_dir():
        return source
    whole = RunDir(source.name, source.parent).whole_checkpoints()
    if not whole:
        raise UserError(
            f"no checkpoint in {source}",
            expected="a run with a whole checkpoint (runs/NAME), or a checkpoint folder (.../step-N)",
            found="no such folder" if not source.exists() else "nothing that was written to the end",
            do="train first: python launch.py --recipe NAME",
        )
    return whole[-1]


def generate(model: Path, prompt: str, tokens: int) -> str:
    """Greedy continuation by plain transformers, as any user of the export would get it."""
    import torch
    from transformers import AutoModelForCausalLM

    from data.tokenizer import load_tokenizer

    if not (model / "config.json").is_file():
        raise UserError(
            f"no model in {model}",
            expected="a Hugging Face folder with config.json",
            found="no such folder" if not model.exists() else "a folder without config.json",
            do="python launch.py convert export runs/NAME FOLDER",
        )
    tokenizer = load_tokenizer(str(model))
    network = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        out = network.generate(**ids, max_new_tokens=tokens, do_sample=False, repetition_penalty=1.2)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
