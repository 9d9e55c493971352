"""How long a run trains, as the command line says it: in tokens or in readings of the corpora."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from common.errors import UserError
from common.quantities import parse_count
from common.spec import RunSpec
from data.manifest import load_manifest
from data.resolve_blend import load_run_blend, resolve_run_blend
from recipes.plan import Plan
from recipes.resolve import Resolved, resolve, with_tokens


def with_length(
    spec: RunSpec, tokens: str | None, epochs: float | None, tokens_per_step: str | None
) -> RunSpec | Resolved:
    """The spec with `--tokens`, `--epochs` and `--tokens-per-step` as numbers of tokens.

    Epochs are counted of the corpora that the run reads: the spec is resolved for them, and returned so.

    Raises:
        UserError: a number that cannot be read, both lengths at once, or a corpus whose size is not known here.
    """
    if tokens is not None and epochs is not None:
        raise UserError(
            "--tokens and --epochs both say how long to train",
            expected="one of them",
            found=f"--tokens {tokens} --epochs {epochs:g}",
            do=f"leave --epochs {epochs:g} out",
        )
    if tokens_per_step is not None:
        spec = dataclasses.replace(spec, tokens_per_step=parse_count(tokens_per_step, "--tokens-per-step"))
    if tokens is not None:
        return dataclasses.replace(spec, tokens=parse_count(tokens, "--tokens"))
    if epochs is None:
        return spec
    if not 0 < epochs <= 1000:
        raise UserError(
            "--epochs is out of range", expected="above 0, up to 1000", found=f"{epochs:g}", do="--epochs 1"
        )
    resolved = resolve(spec)
    return with_tokens(resolved, _tokens_of(resolved.plan, epochs))


def _tokens_of(plan: Plan, epochs: float) -> int:
    """Tokens of a run that reads its corpus, or the new domains of its blend together, `epochs` times."""
    if plan.blend is not None and load_run_blend(plan.blend).stages:
        raise UserError(
            "--epochs with a blend of stages",
            expected="--tokens: how often each domain is read follows from the stages",
            found=f"--epochs {epochs:g}",
            do="--tokens 2B, and --dryrun to see the epochs of every domain",
        )
    if plan.blend is not None:
        trained, _ = resolve_run_blend(plan.blend, plan.replay_share)
        new = [domain for domain in trained.domains if domain.role == "new"]
        share = math.fsum(domain.weight for domain in new)
        return math.ceil(epochs * sum(domain.tokens_available for domain in new) / share)
    return math.ceil(epochs * load_manifest(Path(plan.data or "")).splits["train"].tokens)
