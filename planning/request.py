"""What a user can ask of `plan`: the options of `train` that decide its numbers, and which GPU to plan for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.options import option

if TYPE_CHECKING:
    from common.spec import RunSpec
    from recipes.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The options of `plan`."""

    recipe: str = option("A name from `recipes`, or FILE.py:function.", metavar="RECIPE")
    overrides: list[str] | None = option(
        "Numbers of the recipe to change (trainer.max_steps=200).", metavar="[PATH=VALUE]...", default=None
    )
    gpu: str | None = option("Plan for this GPU (--gpu H100, A100, L40S, ...).", metavar="NAME", default=None)
    gpu_memory_gib: float | None = option("Plan for a GPU of this memory.", metavar="N", default=None)
    json: bool = option("One JSON object on standard output.", default=False)
    picture: Path | None = option("Draw the learning rate into this PNG.", metavar="FILE", default=None)
    calibrate: bool = option("Train 20 steps here first, and plan with what they measure.", default=False)
    executor: str | None = option("As for `train`; default: direct or local.", metavar="WHERE", default=None)
    cluster: str | None = option("Cluster file; its gpu_memory_gib is planned for.", metavar="FILE", default=None)
    devices: int | None = option("Ranks per node; default: the recipe's.", metavar="N", default=None)
    nodes: int | None = option("Nodes; default: the recipe's.", metavar="N", default=None)
    profile: str | None = option("Learning rate: gentle, strong, polish or wsd.", metavar="NAME", default=None)
    tokens: str | None = option("Length in tokens (--tokens 2B).", metavar="N", default=None)
    epochs: float | None = option("Length in readings of the new corpora.", metavar="N", default=None)
    tokens_per_step: str | None = option("Global batch in tokens.", metavar="N", default=None)
    memory_profile: str | None = option("conservative, balanced or aggressive.", metavar="SHARE", default=None)
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
        from launcher.run_length import with_length

        flags = (("trainer.devices", self.devices), ("trainer.num_nodes", self.nodes))
        words = (*(f"{path}={number}" for path, number in flags if number is not None), *(self.overrides or ()))
        spec = RunSpec(
            recipe=self.recipe,
            executor=self.executor,
            cluster=self.cluster,
            profile=self.profile,
            memory_profile=self.memory_profile,
            runs=self.runs,
            overrides=words,
        )
        return with_length(spec, self.tokens, self.epochs, self.tokens_per_step)
