"""What the user asked for on the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One call of `python launch.py --recipe ...`.

    Args:
        recipe: a name in recipes/registry.py.
        executor: where it runs; `direct` is this process.
        env: an environment set of runtime/env.py; None takes the recipe's.
        name: the run directory runs/NAME; None takes the recipe's name, numbered if it is taken.
        resume: go on from the newest whole checkpoint of that run.
        dryrun: resolve, check, write and print, but do not train.
        overrides: NeMo-Run `path=value` words, applied in order.
    """

    recipe: str
    executor: str = "direct"
    env: str | None = None
    name: str | None = None
    resume: bool = False
    dryrun: bool = False
    overrides: tuple[str, ...] = ()
