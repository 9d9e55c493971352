"""What the stages of a blend come to for a run: steps, tokens and epochs of each, before NeMo is imported.

A blend without stages has one here, which is called `all`. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data.blend import Blend
from data.blend_math import ResolvedBlend, ValidatedDomain, stage_weights
from data.manifest import load_manifest
from data.resolve_blend import (
    check_tokenizers,
    domain_folders,
    find_warnings,
    load_run_blend,
    resolve_blend,
    resolve_domain,
    resolve_run_blend,
)
from data.sample_order import count_in_order
from data.stages import RunLength, resolve_boundaries


@dataclass(frozen=True)
class ResolvedStage:
    """A stage with its numbers.

    Args:
        name: given or counted.
        until: as the user wrote it; empty for the last stage.
        first: its first step.
        end: the first step after it.
        replay_share: share of its tokens that replay old text.
        within: domain -> share of the tokens of its role; each role sums to 1.
        tokens: domain -> tokens that it reads in this stage.
    """

    name: str
    until: str
    first: int
    end: int
    replay_share: float
    within: dict[str, float]
    tokens: dict[str, int]

    def config(self) -> dict[str, Any]:
        """What the data module needs of it (`data.stages`)."""
        return {
            "name": self.name,
            "first": self.first,
            "replay_share": self.replay_share,
            "within": dict(self.within),
        }


@dataclass(frozen=True)
class ResolvedStages:
    """A blend with the numbers of its stages.

    Args:
        blend: all stages together; the weights are the shares of the whole run.
        folders: name -> folder of every domain of the description, new ones first.
        stages: in their order; one for a blend without stages.
    """

    blend: ResolvedBlend
    folders: dict[str, str]
    stages: tuple[ResolvedStage, ...]

    @property
    def has_stages(self) -> bool:
        """The shares change during the run."""
        return len(self.stages) > 1

    def to_json(self, changed_at_step: int | None = None) -> str:
        """The content of runs/NAME/blend.json: that of a blend, and its stages.

        Args:
            changed_at_step: the step of `--change-blend`. The planned tokens are then not those of the run, but those
                that this blend would have over all its steps; ledger.json has what was read of each blend.
        """
        rows = [
            {**stage.config(), "end": stage.end, "until": stage.until, "tokens_planned": stage.tokens}
            for stage in self.stages
        ]
        content = {**json.loads(self.blend.to_json()), "stages": rows}
        if changed_at_step is not None:
            content |= {
                "changed_at_step": changed_at_step,
                "planned": f"as if this blend had been read from step 0 on and not from step {changed_at_step};"
                " ledger.json has what was read",
            }
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

    def table(self) -> list[str]:
        """Printable lines: the blend over the whole run, then a line per stage and domain that it reads."""
        lines = self.blend.table()
        if not self.has_stages:
            return lines
        width = max(6, *(len(domain.name) for domain in self.blend.domains))
        wide = max(5, *(len(stage.name) for stage in self.stages))
        row = f"{{:<{wide}}}  {{:>17}}  {{:<{width}}}  {{:>7}}  {{:>15}}  {{:>7}}"
        available = {domain.name: domain.tokens_available for domain in self.blend.domains}
        lines.append(row.format("stage", "steps", "domain", "share", "tokens planned", "epochs"))
        for stage in self.stages:
            total = sum(stage.tokens.values())
            for name, tokens in stage.tokens.items():
                steps, share = f"{stage.first:,} to {stage.end:,}", f"{100 * tokens / total:.2f}%"
                epochs = f"{tokens / available[name]:.2f}"
                lines.append(row.format(stage.name, steps, name, share, f"{tokens:,}", epochs))
        return lines


def resolve_stages(
    description: Mapping[str, Any] | str, run: RunLength, replay_share: float | None = None
) -> ResolvedStages:
    """Resolve the `data.blend` and `data.replay_share` of a run, stage by stage.

    Args:
        description: the blend as a table, or the path of its file.
        run: the numbers that decide where its stages end.
        replay_share: replaces the blend's own share, and not that of a stage that has one.

    Raises:
        UserError, PreflightError: as `resolve_blend`, with the name of the stage; or a boundary that the run never
            reaches.
    """
    blend = load_run_blend(description)
    if not blend.stages:
        trained, folders = resolve_run_blend(description, replay_share, run.max_steps * run.tokens_per_step)
        tokens = {domain.name: domain.tokens_planned for domain in trained.domains}
        only = ResolvedStage("all", "", 0, run.max_steps, trained.replay_share, shares_within_roles(trained), tokens)
        return ResolvedStages(trained, folders, (only,))
    share = blend.replay_share if replay_share is None else replay_share
    domains = sorted(blend.domains, key=lambda domain: domain.role)
    blend = Blend(domains=domains, replay_share=share, epochs_cap=blend.epochs_cap, stages=blend.stages)
    check_tokenizers(domains, [load_manifest(domain.folder) for domain in domains])
    bounds = resolve_boundaries(blend.stages, run)
    found = tuple(
        _resolve_stage(name, part, "" if stage.until is None else str(stage.until), first, end, run)
        for (name, part), stage, (first, end) in zip(blend.parts, blend.stages, bounds, strict=True)
    )
    return ResolvedStages(_add_up(blend, found, run), domain_folders(description), found)


def shares_within_roles(blend: ResolvedBlend) -> dict[str, float]:
    """Domain -> its share of the tokens of its role."""
    totals = {
        role: math.fsum(domain.weight for domain in blend.domains if domain.role == role) for role in ("new", "replay")
    }
    return {domain.name: domain.weight / totals[domain.role] for domain in blend.domains}


def _resolve_stage(name: str, part: Blend, until: str, first: int, end: int, run: RunLength) -> ResolvedStage:
    samples = (end - first) * run.global_batch_size
    resolved = resolve_blend(part, samples * run.seq_length)
    within, roles = shares_within_roles(resolved), {domain.name: domain.role for domain in resolved.domains}
    weights = stage_weights(within, part.replay_share, roles)
    counts = count_in_order(list(weights.values()), samples)
    tokens = {domain: count * run.seq_length for domain, count in zip(weights, counts, strict=True)}
    return ResolvedStage(name, until, first, end, part.replay_share, within, tokens)


def _add_up(blend: Blend, stages: Sequence[ResolvedStage], run: RunLength) -> ResolvedBlend:
    """The tokens of all stages together, with the warnings of the whole run."""
    total = run.max_steps * run.tokens_per_step
    domains = [domain for domain in blend.domains if any(domain.name in stage.tokens for stage in stages)]
    manifests = [load_manifest(domain.folder) for domain in domains]
    tokens = [sum(stage.tokens.get(domain.name, 0) for stage in stages) for domain in domains]
    rows = zip(domains, manifests, [count / total for count in tokens], tokens, strict=True)
    resolved = tuple(resolve_domain(*row) for row in rows)
    replay = sum(domain.tokens_planned for domain in resolved if domain.role == "replay")
    warnings = tuple(find_warnings(resolved, blend.epochs_cap, manifests))
    left_out = tuple(ValidatedDomain(d.name, d.role, d.folder) for d in blend.domains if d not in domains)
    return ResolvedBlend(resolved, replay / total, total, warnings, left_out)
