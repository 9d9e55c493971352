"""What a blend comes to for a run: weights, planned tokens, epochs and warnings, read from the corpora's manifests.

Every sample has seq_length tokens, so shares of tokens are shares of samples; how Megatron-Core draws the samples is
`data.blend_math.count_planned_samples`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.blend import Blend, Domain, parse_blend, read_yaml
from data.blend_math import ResolvedBlend, ResolvedDomain, ValidatedDomain, apportion
from data.indexed import check_prefix
from data.manifest import SPLITS, Manifest, load_manifest


def resolve_blend(blend: Blend, total_tokens: int) -> ResolvedBlend:
    """Compute weights, planned tokens and epochs of each domain for a run of `total_tokens` tokens.

    Raises:
        UserError: total_tokens below 1, a folder that is no prepared corpus or has no tokens to train on (or, of a
            watched domain, to validate), one folder named twice, tokenizers that differ, weights for only some domains
            of a role.
        PreflightError: a .bin/.idx pair that is broken.
    """
    if total_tokens < 1:
        raise UserError(
            "the run has no tokens to train on",
            expected="at least 1 token",
            found=f"total_tokens={total_tokens}",
            do="trainer.max_steps=1000",
        )
    _check_folders(blend.domains)
    manifests = [_load_domain_manifest(domain) for domain in blend.trained]
    check_tokenizers((*blend.trained, *blend.watched), [*manifests, *map(_load_domain_manifest, blend.watched)])
    weights = domain_weights(blend, [manifest.splits["train"].tokens for manifest in manifests])
    tokens = plan_tokens(blend, weights, total_tokens)
    domains = tuple(resolve_domain(*each) for each in zip(blend.trained, manifests, weights, tokens, strict=True))
    warnings = tuple(find_warnings(domains, blend.epochs_cap, manifests))
    validated_only = tuple(ValidatedDomain(domain.name, domain.role, domain.folder) for domain in blend.watched)
    return ResolvedBlend(domains, blend.replay_share, total_tokens, warnings, validated_only)


def resolve_run_blend(
    description: Mapping[str, Any] | str, replay_share: float | None = None, total_tokens: int = 1
) -> tuple[ResolvedBlend, dict[str, str]]:
    """Resolve the `data.blend` and `data.replay_share` of a run: what it trains on, and what it validates on.

    Args:
        description: the blend as a table, or the path of its file.
        replay_share: replaces the blend's own share; with 0 the replay domains are validated but not trained on.
        total_tokens: tokens that the run trains on.

    Returns:
        the resolved training blend, and name -> folder of every domain of the description: new ones first, watched ones
        last.

    Raises:
        UserError, PreflightError: as `resolve_blend`.
    """
    blend = load_run_blend(description)
    if blend.stages:
        raise UserError(
            "the shares of this blend change with its stages",
            expected="a blend without stages",
            found=f"{len(blend.stages)} stages",
            do="data.resolve_stages.resolve_stages, which takes the length of the run",
        )
    domains = sorted(blend.domains, key=lambda domain: domain.role)
    share = blend.replay_share if replay_share is None else replay_share
    kept = domains if share else [domain for domain in domains if domain.role != "replay"]
    resolved = resolve_blend(Blend(domains=kept, replay_share=share, epochs_cap=blend.epochs_cap), total_tokens)
    check_tokenizers(domains, [load_manifest(domain.folder) for domain in domains])
    left_out = [ValidatedDomain(d.name, d.role, d.folder) for d in domains if d not in kept]
    resolved = replace(resolved, validated_only=(*left_out, *resolved.validated_only))
    return resolved, {domain.name: str(domain.folder) for domain in domains}


def load_run_blend(description: Mapping[str, Any] | str) -> Blend:
    """The `data.blend` of a run: a table, or the path of its file.

    Raises:
        UserError: no such file, or not a blend.
    """
    return parse_blend(read_yaml(Path(description)) if isinstance(description, str) else description)


def domain_folders(description: Mapping[str, Any] | str) -> dict[str, str]:
    """Name -> folder of every domain of the `data.blend` of a run, new ones first.

    Raises:
        UserError: as `load_run_blend`.
    """
    domains = sorted(load_run_blend(description).domains, key=lambda domain: domain.role)
    return {domain.name: str(domain.folder) for domain in domains}


def domain_weights(blend: Blend, tokens_available: Sequence[int]) -> list[float]:
    """Share of each trained domain in all training tokens: first by role, then by weight or by tokens available.

    Raises:
        UserError: only some domains of a role have a weight.
    """
    found = [0.0] * len(tokens_available)
    for role, share in (("new", 1.0 - blend.replay_share), ("replay", blend.replay_share)):
        group = [i for i, domain in enumerate(blend.trained) if domain.role == role]
        weights = [blend.trained[i].weight for i in group]
        missing = [blend.trained[i].name for i in group if blend.trained[i].weight is None]
        if missing and len(missing) < len(group):
            raise UserError(
                f"some {role} domains have a weight and some have none",
                expected="a weight for all of them, or for none",
                found=f"no weight for {', '.join(missing)}",
                do=f"give a weight to {', '.join(missing)}, or remove the other weights",
            )
        raw = [
            float(tokens_available[i]) if weight is None else weight for i, weight in zip(group, weights, strict=True)
        ]
        for i, weight in zip(group, raw, strict=True):
            found[i] = share * (weight / math.fsum(raw))
    return found


def plan_tokens(blend: Blend, weights: Sequence[float], total: int) -> list[int]:
    """Planned tokens of each trained domain: the replay share exact to one token, then the weights in each role."""
    found = [0] * len(weights)
    totals = apportion([1.0 - blend.replay_share, blend.replay_share], total)
    for role, role_total in zip(("new", "replay"), totals, strict=True):
        group = [i for i, domain in enumerate(blend.trained) if domain.role == role]
        shares = apportion([weights[i] for i in group], role_total) if group else []
        for i, tokens in zip(group, shares, strict=True):
            found[i] = tokens
    return found


def resolve_domain(domain: Domain, manifest: Manifest, weight: float, tokens: int) -> ResolvedDomain:
    """The domain with its share of all training tokens (0..1) and the tokens planned of it."""
    train = manifest.splits["train"]
    return ResolvedDomain(
        name=domain.name,
        role=domain.role,
        folder=domain.folder,
        weight=weight,
        tokens_available=train.tokens,
        tokens_planned=tokens,
        epochs_planned=tokens / train.tokens,
        bytes_per_token=train.text_bytes / train.tokens,
        splits=tuple(split for split in SPLITS if manifest.splits[split].tokens),
    )


def find_warnings(domains: Sequence[ResolvedDomain], epochs_cap: float, manifests: Sequence[Manifest]) -> list[str]:
    """One line for each domain that is read too often, not at all or twice, or that cannot be validated."""
    found: list[str] = []
    name_by_content: dict[str, str] = {}
    for domain, manifest in zip(domains, manifests, strict=True):
        if domain.epochs_planned > epochs_cap:
            most = math.floor(epochs_cap * domain.tokens_available)
            found.append(
                f"{domain.name}: {domain.epochs_planned:.2f} epochs planned, above {epochs_cap:g}: the model starts to"
                f" memorise it; plan at most {most:,} of its tokens, or add text"
            )
        if domain.tokens_planned == 0:
            found.append(f"{domain.name}: no token planned; the run is too short for its weight")
        if "validation" not in domain.splits:
            found.append(f"{domain.name}: no validation tokens, so its loss is not measured")
        first = name_by_content.setdefault(manifest.splits["train"].bin_sha256, domain.name)
        if first != domain.name:
            found.append(f"{domain.name}: the same train tokens as {first}")
    return found


def _load_domain_manifest(domain: Domain) -> Manifest:
    """The manifest of a domain, after checks that it has the tokens it is for and that its files are whole."""
    manifest = load_manifest(domain.folder)
    needed, purpose = ("validation", "validate") if domain.role == "watch" else ("train", "train on")
    if manifest.splits[needed].tokens < 1:
        raise UserError(
            f"domain {domain.name} has nothing to {purpose}",
            expected=f"tokens in its {needed} split",
            found="0 tokens",
            do=f"prepare {domain.folder} again with more documents or another split",
        )
    for split in (needed,) if domain.role == "watch" else SPLITS:
        findings = check_prefix(domain.folder / split) if manifest.splits[split].tokens else []
        if findings:
            raise findings[0]
    return manifest


def _check_folders(domains: Sequence[Domain]) -> None:
    name_by_folder: dict[Path, str] = {}
    for domain in domains:
        first = name_by_folder.setdefault(domain.folder.resolve(), domain.name)
        if first != domain.name:
            raise UserError(
                "one folder is in the blend twice",
                expected="each folder once",
                found=f"{first}, {domain.name}",
                do="remove one of them: weights say how often a folder is read",
            )


def check_tokenizers(domains: Sequence[Domain], manifests: Sequence[Manifest]) -> None:
    """Check that one tokenizer made all domains.

    Raises:
        UserError: they have several.
    """
    names: dict[str, list[str]] = {}
    for domain, manifest in zip(domains, manifests, strict=True):
        names.setdefault(manifest.tokenizer.fingerprint, []).append(f"{domain.name} ({manifest.tokenizer.source})")
    if len(names) > 1:
        raise UserError(
            "the domains were made with different tokenizers",
            expected="one fingerprint for all",
            found="; ".join(f"{fingerprint[:12]}: {', '.join(group)}" for fingerprint, group in names.items()),
            do="prepare all domains with the tokenizer of the model",
        )
