"""What a user can ask of `train` and `resume`: each option with its default and its help text.

`plan` and `pilot` inherit the options that they share with `train`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from common.options import option

if TYPE_CHECKING:  # imported where they are needed: the help shows these options without reading recipes
    from common.rundir import RunDir
    from common.spec import RunSpec
    from recipes.resolve import Resolved


@dataclass(frozen=True, kw_only=True)
class OverridesRequest:
    """What every command takes that reads a recipe: its numbers can be changed."""

    overrides: list[str] | None = option(
        "Numbers of the recipe to change (trainer.max_steps=200).", metavar="[PATH=VALUE]...", default=None
    )

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides as they were typed."""
        return tuple(self.overrides or ())


@dataclass(frozen=True, kw_only=True)
class NumbersRequest(OverridesRequest):
    """The options of `train`, `plan` and `pilot` that stand for numbers of the recipe."""

    profile: str | None = option(
        "Learning rate: gentle, strong, polish or wsd; default: the recipe's.", metavar="NAME", default=None
    )
    tokens: str | None = option(
        "Length in tokens (--tokens 2B); default: the recipe's steps.", metavar="N", default=None
    )
    epochs: float | None = option("Length in readings of the new corpora (--epochs 1).", metavar="N", default=None)
    tokens_per_step: str | None = option(
        "Global batch in tokens (--tokens-per-step 262144).", metavar="N", default=None
    )
    memory_profile: str | None = option(
        "conservative, balanced or aggressive; default: the recipe's.", metavar="SHARE", default=None
    )

    def with_length(self, spec: RunSpec) -> RunSpec | Resolved:
        """The spec with the length and the global batch that were asked for.

        Raises:
            UserError: a number cannot be read, or the corpora that `--epochs` counts are not there.
        """
        from launcher.run_length import with_length

        return with_length(spec, self.tokens, self.epochs, self.tokens_per_step)


@dataclass(frozen=True, kw_only=True)
class RanksRequest(OverridesRequest):
    """The options of `train`, `resume` and `plan` that say where, and on how many ranks."""

    executor: str | None = option(
        "direct, local, mpirun, docker, slurm, k8s; default: direct or local.", metavar="WHERE", default=None
    )
    cluster: str | None = option(
        "For slurm, k8s, docker; default: none (docs/clusters/slurm.yaml).", metavar="FILE", default=None
    )
    devices: int | None = option("Ranks per node; default: the recipe's (--devices 2).", metavar="N", default=None)
    nodes: int | None = option("Nodes; default: the recipe's (--nodes 2).", metavar="N", default=None)

    @property
    def words(self) -> tuple[str, ...]:
        """The overrides, with --devices and --nodes as overrides in front of them."""
        flags = (("trainer.devices", self.devices), ("trainer.num_nodes", self.nodes))
        return (*(f"{path}={number}" for path, number in flags if number is not None), *(self.overrides or ()))


@dataclass(frozen=True, kw_only=True)
class RunRequest(RanksRequest):
    """The options that `train` and `resume` share."""

    env: str | None = option(
        "Environment sets instead of the recipe's (dual+prod), or added (+prod).", metavar="SETS", default=None
    )
    retries: int | None = option(
        "How often a failed run is started again; default: 0 (--retries 3).", metavar="N", default=None
    )
    retry_wait: float | None = option("Seconds before each retry; default: 10.", metavar="S", default=None)
    change_blend: bool = option("On a resume: go on with another blend, replay share or budget.", default=False)
    dryrun: bool = option("Check, and print the configuration as YAML; train nothing.", default=False)

    def __post_init__(self) -> None:
        for name, value in (("--retries", self.retries), ("--retry-wait", self.retry_wait)):
            if value is not None and not 0 <= value < float("inf"):
                raise UserError(f"{name} {value}", expected="0 or more", found=str(value), do=f"{name} 3")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(RunRequest, NumbersRequest):
    """The options of `train`."""

    recipe: str | None = option(
        "From `recipes`, or FILE.py:function (--recipe qwen25_tiny).", metavar="NAME", default=None
    )
    config: Path | None = option(
        "A run in YAML (--config mine.yaml); what is given beside it wins.", metavar="FILE", default=None
    )
    name: str | None = option(
        "Run directory runs/RUN; default: the recipe's name, numbered.", metavar="RUN", default=None
    )
    resume: bool = option("Continue from the newest complete checkpoint of the run.", default=False)
    write: bool = option("With --dryrun: keep runs/RUN, to start it by other means.", default=False)
    runs: str | None = option("Folder of the run directories; default: runs.", metavar="DIR", default=None)
    no_gates: bool = option("Leave the truth gates out (docs/truth.md); the passport says so.", default=False)

    def spec(self) -> RunSpec | Resolved:
        """What is to be run: the file of --config, and what is given beside it, which wins.

        Raises:
            UserError: no recipe is named, or the file or a length cannot be read.
        """
        from common.spec import RunSpec
        from launcher import run_file

        names = ["recipe", "name", "runs", "executor", "cluster", "env", "profile", "memory_profile"]
        names += ["retries", "retry_wait"]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given |= {name: getattr(self, name) or None for name in ("resume", "dryrun", "write", "change_blend")}
        given["gates"] = False if self.no_gates else None
        described = run_file.load(self.config) if self.config is not None else RunSpec(recipe="")
        spec = run_file.merge(described, given, self.words)
        return self.with_length(spec)


@dataclass(frozen=True, kw_only=True)
class ResumeRequest(RunRequest):
    """The options of `resume`; what is not given stays as the run was started."""

    run: str = option("A run: NAME or runs/NAME.", metavar="RUN")
    from_: str | None = option(
        "Continue from this checkpoint, in a new run; `list RUN` shows them.", metavar="step-N", default=None
    )
    name: str | None = option("With --from: the new run; default: RUN-from-step-N.", metavar="NEW", default=None)

    @contextlib.contextmanager
    def folder(self) -> Iterator[RunDir]:
        """The run to continue; with --from a new one, which is removed again if nothing starts in it.

        Raises:
            UserError: there is no such run or checkpoint, or the new run's name is in use.
        """
        from common.rundir import find_run
        from launcher.fork_run import forked

        if self.from_ is None and self.name is not None:
            raise UserError(
                "--name is for a new run",
                expected="--name with --from, or neither",
                found=f"--name {self.name}",
                do=f"leave --name {self.name} out",
            )
        run = find_run(self.run)
        with forked(run, self.from_, self.name) if self.from_ is not None else contextlib.nullcontext(run) as folder:
            yield folder

    def spec(self, folder: RunDir) -> RunSpec:
        """What is to be continued in `folder`, and the changes given.

        Raises:
            UserError: no run was written there.
        """
        from common.spec import RunSpec

        return RunSpec(
            recipe=folder.spec().recipe,
            executor=self.executor,
            cluster=self.cluster,
            env=self.env,
            name=folder.name,
            runs=str(folder.path.parent),
            resume=True,
            change_blend=self.change_blend,
            dryrun=self.dryrun,
            retries=self.retries or 0,
            retry_wait=RunSpec.retry_wait if self.retry_wait is None else self.retry_wait,
            overrides=self.words,
        )
