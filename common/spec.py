"""What the user asked for on the command line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from common.commands import launch_command
from common.json_files import parse_json


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One call of `python launch.py --recipe ...`, as runs/NAME/spec.json keeps it for the ranks.

    Args:
        recipe: a name that `launch.py recipes` lists, or FILE.py:function.
        executor: where it runs (launcher/executors); None lets the launcher choose by the number of ranks.
        cluster: a cluster file (launcher/cluster_file.py), for the executors that need one.
        env: an environment set of common/environment/merge.py; None takes the recipe's.
        memory_profile: share of each GPU's memory to fit the batch to (recipes/memory.py); None takes the recipe's.
        process_group_backend: what the environment set asks for (`gloo`); None leaves it to the recipe.
        profile: of recipes/profiles.py; None takes the recipe's learning rate.
        tokens: length of the training in tokens, rounded up to whole steps, with the schedule laid out over it; None
            takes the recipe's number of steps.
        tokens_per_step: size of a global batch in tokens, rounded to whole micro batches; None takes the recipe's.
        runs: the folder that holds the run directories.
        gates: check before step 1 that the run trains what its recipe says (training/gates.py).
        name: the run directory runs/NAME; None takes the recipe's name, numbered if it is taken.
        resume: continue from the newest complete checkpoint of that run, whose recorded spec stands where this one
            says nothing else.
        change_blend: train on another blend than before, from the checkpoint on.
        dryrun: resolve, check and print, but do not train.
        write: keep the run directory that a dry run writes, to start it by other means.
        retries: how often a run that failed is started again, from its newest checkpoint.
        retry_wait: seconds before each of these starts.
        overrides: NeMo-Run `path=value` words, applied in order.
        validate: checkpoints to validate in place of training, first the one to compare the last one with; set by
            launcher/merge_run.py.
        first_validation: first-validation.npz of the run that these checkpoints belong to.
        attempt: which attempt at this run it is, from 1; set by the launcher.
        elsewhere: the ranks start on other machines, or in a container: they check the machine, choose the micro batch
            and record the data themselves; set by the launcher.
    """

    recipe: str
    executor: str | None = None
    cluster: str | None = None
    env: str | None = None
    memory_profile: str | None = None
    process_group_backend: str | None = None
    profile: str | None = None
    tokens: int | None = None
    tokens_per_step: int | None = None
    runs: str = "runs"
    gates: bool = True
    name: str | None = None
    resume: bool = False
    change_blend: bool = False
    dryrun: bool = False
    write: bool = False
    retries: int = 0
    retry_wait: float = 10.0
    overrides: tuple[str, ...] = ()
    validate: tuple[str, ...] = ()
    first_validation: str = ""
    attempt: int = 1
    elsewhere: bool = False

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunSpec:
        row = parse_json(text)
        lists = {name: tuple(row.get(name, ())) for name in ("overrides", "validate")}
        return cls(**{**row, **lists})

    @property
    def resume_command(self) -> str:
        """What to type to continue after a stop; the run directory has recorded the rest."""
        run = self.name or self.recipe
        return launch_command("resume", run if self.runs == "runs" else f"{self.runs}/{run}")
