"""Which corpora a run trains on, in which shares: a description, checked, and the arithmetic behind it.

A blend names prepared folders as `new` (to be learned) or `replay` (not to be forgotten). `resolve` turns it
into weights, planned tokens and epochs. Every sample has seq_length tokens, so shares of tokens are shares of
samples; how Megatron-Core walks through them is `data.blend_math.planned_samples`. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError
from data.blend_math import ResolvedBlend, ResolvedDomain, Role, apportion, planned_samples
from data.indexed import check_prefix
from data.manifest import SPLITS, Manifest, load_manifest

__all__ = ["Blend", "Domain", "ResolvedBlend", "ResolvedDomain", "load", "parse", "planned_samples", "resolve"]


class Domain(BaseModel):
    """One corpus of a blend.

    Args:
        name: short name; the report and the per-domain losses carry it.
        folder: a folder made by `launch.py data prepare`, relative to the working directory.
        role: "new" or "replay".
        weight: share within its role, relative to the others; all of a role or none. Default: tokens available.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    folder: Path
    role: Role
    weight: float | None = Field(default=None, gt=0)


class Blend(BaseModel):
    """Corpora, and the share of all training tokens that replays old text.

    Args:
        domains: at least one.
        replay_share: share of the tokens that the replay domains get together, in 0..1.
        epochs_cap: epochs over a domain above which a warning is given.

    Raises:
        UserError: an unknown key, a wrong type or value (with the path of the field), two domains of one name,
            a replay share without replay domain, or the other way round.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    domains: tuple[Domain, ...] = Field(min_length=1)
    replay_share: float = Field(default=0.0, ge=0, le=1)
    epochs_cap: float = Field(default=4.0, gt=0)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _explained(error) from None
        _check_names([domain.name for domain in self.domains])
        _check_share(self)


def load(path: Path) -> Blend:
    """Read a blend from a .yaml, .yml or .json file.

    Raises:
        UserError: no such file, not readable as YAML or JSON, or not a blend.
    """
    return parse(yaml_of(path))


def yaml_of(path: Path) -> Any:
    """What a YAML or JSON file holds."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        do = "write it as docs/schedules.md shows"
        raise UserError(f"cannot read the blend {path}", expected="YAML or JSON", found=str(error), do=do) from None


def parse(raw: object) -> Blend:
    """A blend from what a YAML or JSON file holds."""
    if not isinstance(raw, Mapping):
        raise _bad("the blend is not a table", "domains: [...], replay_share: 0.25", type(raw).__name__, "see the docs")
    return Blend(**{str(key): value for key, value in raw.items()})


def resolve(blend: Blend, total_tokens: int) -> ResolvedBlend:
    """Weights, planned tokens and epochs of each domain for a run of `total_tokens` tokens.

    Raises:
        UserError: total_tokens below 1, a folder that is no prepared corpus or has no tokens to train on, one
            folder named twice, tokenizers that differ, weights for only some domains of a role.
        PreflightError: a .bin/.idx pair that is broken.
    """
    if total_tokens < 1:
        raise _bad("nothing to train on", "at least 1 token", f"total_tokens={total_tokens}", "trainer.max_steps=1000")
    _check_folders(blend.domains)
    manifests = [_manifest(domain) for domain in blend.domains]
    _check_tokenizers(blend.domains, manifests)
    weights = _weights(blend, [manifest.splits["train"].tokens for manifest in manifests])
    tokens = _tokens(blend, weights, total_tokens)
    domains = tuple(_resolved(*each) for each in zip(blend.domains, manifests, weights, tokens, strict=True))
    warnings = tuple(_warnings(domains, blend.epochs_cap, manifests))
    return ResolvedBlend(domains, blend.replay_share, total_tokens, warnings)


def chosen(
    raw: Mapping[str, Any] | str, replay_share: float | None = None, total_tokens: int = 1
) -> tuple[ResolvedBlend, dict[str, str]]:
    """What a run trains on, and what it validates: a blend given as a table or as the path of its file.

    Args:
        raw: the description or its file.
        replay_share: instead of the blend's own; 0 leaves the replay domains to validation.
        total_tokens: of the run.

    Returns:
        the resolved training blend, and name -> folder of every domain, new ones first.
    """
    given = parse(yaml_of(Path(raw)) if isinstance(raw, str) else raw)
    domains = sorted(given.domains, key=lambda domain: domain.role)
    fields: dict[str, Any] = {"domains": domains, "replay_share": given.replay_share, "epochs_cap": given.epochs_cap}
    if replay_share is not None:
        fields["replay_share"] = replay_share
    if fields["replay_share"] == 0:
        fields["domains"] = [domain for domain in domains if domain.role == "new"]
    trained = resolve(Blend(**fields), total_tokens)
    _check_tokenizers(domains, [load_manifest(domain.folder) for domain in domains])
    return trained, {domain.name: str(domain.folder) for domain in domains}


def _weights(blend: Blend, available: list[int]) -> list[float]:
    """Share of each domain in all tokens: by role, and within a role by weight or by tokens available."""
    found = [0.0] * len(available)
    for role, share in (("new", 1.0 - blend.replay_share), ("replay", blend.replay_share)):
        group = [i for i, domain in enumerate(blend.domains) if domain.role == role]
        given = [blend.domains[i].weight for i in group]
        missing = [blend.domains[i].name for i in group if blend.domains[i].weight is None]
        if missing and len(missing) < len(group):
            do = f"give a weight to {', '.join(missing)}, or to none of them"
            raise _bad(f"some {role} domains have a weight and some have none", "all or none", ", ".join(missing), do)
        raw = [float(available[i]) if weight is None else weight for i, weight in zip(group, given, strict=True)]
        for i, weight in zip(group, raw, strict=True):
            found[i] = share * (weight / math.fsum(raw))
    return found


def _tokens(blend: Blend, weights: list[float], total: int) -> list[int]:
    """Planned tokens of each domain: the replay share holds to the token, then the weights within each role."""
    found = [0] * len(weights)
    groups = apportion([1.0 - blend.replay_share, blend.replay_share], total)
    for role, group_total in zip(("new", "replay"), groups, strict=True):
        group = [i for i, domain in enumerate(blend.domains) if domain.role == role]
        shares = apportion([weights[i] for i in group], group_total) if group else []
        for i, tokens in zip(group, shares, strict=True):
            found[i] = tokens
    return found


def _resolved(domain: Domain, manifest: Manifest, weight: float, tokens: int) -> ResolvedDomain:
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


def _warnings(domains: Sequence[ResolvedDomain], cap: float, manifests: Sequence[Manifest]) -> list[str]:
    found: list[str] = []
    seen: dict[str, str] = {}
    for domain, manifest in zip(domains, manifests, strict=True):
        if domain.epochs_planned > cap:
            most = math.floor(cap * domain.tokens_available)
            found.append(
                f"{domain.name}: {domain.epochs_planned:.2f} epochs planned, above {cap:g}: the model starts to learn"
                f" it by heart; at most {most:,} of its tokens, or more text"
            )
        if domain.tokens_planned == 0:
            found.append(f"{domain.name}: no token planned; the run is too short for its weight")
        if "validation" not in domain.splits:
            found.append(f"{domain.name}: no validation tokens, so its loss is not measured")
        twin = seen.setdefault(manifest.splits["train"].bin_sha256, domain.name)
        if twin != domain.name:
            found.append(f"{domain.name}: the same train tokens as {twin}")
    return found


def _manifest(domain: Domain) -> Manifest:
    manifest = load_manifest(domain.folder)
    if manifest.splits["train"].tokens < 1:
        do = f"prepare {domain.folder} again with more documents or another split"
        raise _bad(f"domain {domain.name} has nothing to train on", "tokens in its train split", "0 tokens", do)
    for split in SPLITS:
        broken = check_prefix(domain.folder / split) if manifest.splits[split].tokens else []
        if broken:
            raise broken[0]
    return manifest


def _check_names(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        do = "rename one of them, or take it out"
        raise _bad("two domains have one name", "a name of its own for each domain", ", ".join(twice), do)


def _check_share(blend: Blend) -> None:
    """Each role gets tokens exactly when it has a domain."""
    roles = {domain.role for domain in blend.domains}
    share = blend.replay_share
    if share > 0 and "replay" not in roles:
        do = "add a domain with role: replay, or replay_share: 0"
        raise _bad("a replay share without a replay domain", "a domain of role replay", f"replay_share={share}", do)
    if share == 0 and "replay" in roles:
        names = ", ".join(domain.name for domain in blend.domains if domain.role == "replay")
        raise _bad(
            "a replay domain without a share", "replay_share above 0", names, "replay_share: 0.05 (5% of tokens)"
        )
    if share == 1 and "new" in roles:
        raise _bad(
            "nothing is left for the new domains", "replay_share below 1", "replay_share=1", "replay_share: 0.25"
        )
    if share < 1 and "new" not in roles:
        do = "add a domain with role: new, or replay_share: 1"
        raise _bad("the shares do not add up to 1", "a domain of role new", f"only replay, share {share}", do)


def _check_folders(domains: Sequence[Domain]) -> None:
    seen: dict[Path, str] = {}
    for domain in domains:
        first = seen.setdefault(domain.folder.resolve(), domain.name)
        if first != domain.name:
            do = "take one of them out: weights say how often a folder is read"
            raise _bad("one folder is in the blend twice", "each folder once", f"{first}, {domain.name}", do)


def _check_tokenizers(domains: Sequence[Domain], manifests: Sequence[Manifest]) -> None:
    kinds: dict[str, list[str]] = {}
    for domain, manifest in zip(domains, manifests, strict=True):
        kinds.setdefault(manifest.tokenizer.fingerprint, []).append(f"{domain.name} ({manifest.tokenizer.source})")
    if len(kinds) > 1:
        found = "; ".join(f"{print_[:12]}: {', '.join(names)}" for print_, names in kinds.items())
        do = "prepare all domains with the tokenizer of the model"
        raise _bad("the domains were made with different tokenizers", "one fingerprint for all", found, do)


def _explained(error: ValidationError) -> UserError:
    """Pydantic's findings in our words: every field by its path."""
    rows = error.errors(include_url=False)
    where = [
        "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in row["loc"]).lstrip(".") for row in rows
    ]
    found = "; ".join(
        f"{path}: {row['msg']} (it is {row['input']!r:.60})" for path, row in zip(where, rows, strict=True)
    )
    known = ", ".join(Blend.model_fields) + "; in a domain: " + ", ".join(Domain.model_fields)
    return _bad(
        f"the blend is wrong at {', '.join(where)}", f"the keys {known}", found, "correct it in the blend's file"
    )


def _bad(what: str, expected: str, found: str, do: str) -> UserError:
    return UserError(what, expected=expected, found=found, do=do)
