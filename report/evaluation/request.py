"""What the user asks of `launch.py evaluate`; the texts are its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.hub import check_model_name
from common.options import option
from common.rundir import existing_run


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """What the user asked for on the command line."""

    model: str = option("An exported folder, a run (NAME or runs/NAME), a checkpoint, or a hub id in the cache.")
    against: str | None = option(
        "The model to compare with; default for a run: its base. none: no other.", default=None
    )
    tasks: str | None = option(
        "Comma-separated: cloze, next_line, bits (the default), and tasks of the harness.", metavar="LIST", default=None
    )
    text: list[str] | None = option(
        "Held-out text for the first three: a prepared corpus (its test split) or files. May be repeated.",
        metavar="PATH",
        default=None,
    )
    limit: int | None = option("Items of each task at most.", metavar="N", default=None)
    batch_size: int = option("Items at a time.", default=4)
    device: str | None = option("cpu or cuda; default: the GPU if there is one.", default=None)
    output: Path | None = option("The JSON file to write; default: in the run or folder.", metavar="FILE", default=None)
    runs: str = option("Folder of the run directories.", metavar="DIR", default="runs")

    def check(self) -> None:
        """Check what needs no import of torch.

        Raises:
            UserError: a number below 1, or a name that is neither a run nor a model.
        """
        for name, value in (("limit", self.limit), ("batch-size", self.batch_size)):
            if value is not None and value < 1:
                raise UserError(f"--{name} is too small", expected="1 or more", found=str(value), do=f"--{name} 4")
        for model in (self.model, self.against):
            if model not in (None, "none") and existing_run(str(model), Path(self.runs)) is None:
                check_model_name(str(model))
