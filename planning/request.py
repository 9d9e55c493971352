"""What a user can ask of `plan`: the options of `train` that decide its numbers, and which GPU to plan for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.options import option
from launcher.requests import NumbersRequest, RanksRequest

if TYPE_CHECKING:
    from common.spec import RunSpec
    from recipes.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class PlanRequest(RanksRequest, NumbersRequest):
    """The options of `plan`."""

    recipe: str = option("A name from `recipes`, or FILE.py:function.", metavar="RECIPE")
    gpu: str | None = option("Plan for this GPU (--gpu H100, A100, L40S, ...).", metavar="NAME", default=None)
    gpu_memory_gib: float | None = option("Plan for a GPU of this memory.", metavar="N", default=None)
    json: bool = option("One JSON object on standard output.", default=False)
    picture: Path | None = option("Draw the learning rate into this PNG.", metavar="FILE", default=None)
    calibrate: bool = option("Train 20 steps here first, and plan with what they measure.", default=False)
    cluster: str | None = option("Cluster file; its gpu_memory_gib is planned for.", metavar="FILE", default=None)
    runs: str = option("Folder of the run directories.", metavar="DIR", default="runs")

    def __post_init__(self) -> None:
        if self.gpu is not None and self.gpu_memory_gib is not None:
            raise UserError(
                "--gpu and --gpu-memory-gib both say which GPU",
                expected="one of them",
                found=f"--gpu {self.gpu} --gpu-memory-gib {self.gpu_memory_gib:g}",
                do=f"leave --gpu-memory-gib {self.gpu_memory_gib:g} out",
            )
        if self.gpu_memory_gib is not None and not 0 < self.gpu_memory_gib <= 4096:
            raise UserError(
                "--gpu-memory-gib is out of range",
                expected="GiB of one GPU, above 0",
                found=f"{self.gpu_memory_gib:g}",
                do="--gpu-memory-gib 80",
            )
        if self.calibrate and (self.gpu is not None or self.gpu_memory_gib is not None):
            raise UserError(
                "--calibrate measures this machine",
                expected="no --gpu and no --gpu-memory-gib beside it",
                found=f"--gpu {self.gpu}" if self.gpu else f"--gpu-memory-gib {self.gpu_memory_gib:g}",
                do="leave it out, and run --calibrate on the machine that has that GPU",
            )

    def spec(self) -> RunSpec | Resolved:
        """The run that is planned.

        Raises:
            UserError: a length cannot be read, or the corpora that `--epochs` counts are not there.
        """
        from common.spec import RunSpec

        spec = RunSpec(
            recipe=self.recipe,
            executor=self.executor,
            cluster=self.cluster,
            profile=self.profile,
            memory_profile=self.memory_profile,
            runs=self.runs,
            overrides=self.words,
        )
        return self.with_length(spec)
