"""Export a trained run as a Hugging Face folder, and compare the export with its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from common.checkpoint_files import check_undamaged
from common.hub import check_model_name
from common.rundir import RUNS, RunDir, find_checkpoint
from convert.output_folder import check_output

if TYPE_CHECKING:
    from convert.verify import Verification


def export_run(source: str | Path, output: Path, like: Path | None = None, root: Path = RUNS) -> Verification:
    """Export a checkpoint and verify the export; a run keeps the result as export.json.

    Args:
        source: a run (NAME or runs/NAME: its newest complete checkpoint), or a checkpoint folder.
        output: the Hugging Face folder to create.
        like: the Hugging Face model whose config and tokenizer files are copied; default: the one the run started from.
        root: folder of runs.

    Raises:
        UserError: no such run, no complete checkpoint in it, a damaged one, or the output is not empty.
    """
    checkpoint = find_checkpoint(source, root)  # checks that take no imports come first
    check_output(output, 0)
    if like is not None:
        check_model_name(str(like))
    from convert.export_hf import export_hf
    from convert.verify import verify

    check_undamaged(checkpoint)
    export_hf(checkpoint, output, like)
    result = verify(checkpoint, output)
    if checkpoint.parent.name == "checkpoints":
        run = RunDir(checkpoint.parents[1].name, checkpoint.parents[2])
        run.export.write_text(json.dumps(_record(checkpoint, output, result), indent=1) + "\n")
    return result


def _record(checkpoint: Path, output: Path, result: Verification) -> dict[str, object]:
    return {
        "checkpoint": str(checkpoint),
        "output": str(output),
        "max_abs_logits": result.logit_difference,
        "max_abs_parameters": result.parameter_difference,
        "bound": result.tolerance,
        "dtype": str(result.precision).removeprefix("torch."),
        "ok": result.ok,
    }
