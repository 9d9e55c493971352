"""The description of a blend: which prepared corpora a run trains on, and in which shares.

A blend names prepared folders with the role `new` (text to learn), `replay` (text that should not be forgotten, and is
trained on again) or `watch` (text that is only validated, to see what becomes of it).
`data.resolve_blend` looks into the folders and computes weights, planned tokens and epochs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.errors import UserError, unknown_name
from common.small_files import parse_yaml, read_small_file
from data.blend_math import EPOCHS_CAP, Role
from data.stages import Stage, check_stages, stage_names


class Domain(BaseModel):
    """One corpus of a blend.

    Args:
        name: short name, used in the report and for the loss of this domain.
        folder: a folder made by `launch.py data prepare`, relative to the working directory.
        role: "new", "replay" or "watch".
        weight: share within its role, relative to the other domains of that role. Either all domains of a role have
            a weight or none; without weights, the shares follow the number of tokens available. A watched domain has
            none, which can also be written as 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    name: str = Field(min_length=1, pattern=r"^[\w.-]+$")
    folder: Path
    role: Role
    weight: float | None = Field(default=None, ge=0)


class Blend(BaseModel):
    """Corpora, and the share of all training tokens that replays old text.

    Args:
        domains: at least one.
        replay_share: share of the tokens that the replay domains get together, in 0..1.
        epochs_cap: epochs over a domain above which a warning is given.
        stages: parts of the run with shares of their own, in their order; without any, the shares never change.

    Raises:
        UserError: an unknown key, a wrong type or value (with the path of the field), two domains of one name, a weight
            of 0 for a domain that is trained on or above 0 for a watched one, a replay share without a replay domain or
            the other way round (in any stage), or a stage without an end.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    domains: tuple[Domain, ...] = Field(min_length=1)
    replay_share: float = Field(default=0.0, ge=0, le=1)
    epochs_cap: float = Field(default=EPOCHS_CAP, gt=0)
    stages: tuple[Stage, ...] = ()

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _validation_error(error) from None
        _check_names([domain.name for domain in self.domains])
        for domain in self.domains:
            _check_weight(domain)
        if not self.stages:
            _check_share(self)
        check_stages(self.stages)
        for name, stage in zip(stage_names(self.stages), self.stages, strict=True):
            _blend_of_stage(self, name, stage)

    @property
    def parts(self) -> list[tuple[str, Blend]]:
        """Name and blend of each stage; a blend without stages has one, which is called `all`."""
        names = stage_names(self.stages)
        if not self.stages:
            return [("all", self)]
        return [(name, _blend_of_stage(self, name, stage)) for name, stage in zip(names, self.stages, strict=True)]

    @property
    def trained(self) -> tuple[Domain, ...]:
        """The domains that are trained on."""
        return tuple(domain for domain in self.domains if domain.role != "watch")

    @property
    def watched(self) -> tuple[Domain, ...]:
        """The domains that are only validated."""
        return tuple(domain for domain in self.domains if domain.role == "watch")


def load_blend(path: Path) -> Blend:
    """Read a blend from a .yaml, .yml or .json file.

    Raises:
        UserError: no such file, not readable as YAML or JSON, or not a blend.
    """
    return parse_blend(read_yaml(path))


def parse_blend(raw: object) -> Blend:
    """Make a blend from the content of a YAML or JSON file.

    Raises:
        UserError: it is not a blend.
    """
    if not isinstance(raw, Mapping):
        raise UserError(
            "the blend is not a table",
            expected="a table with the keys domains and replay_share",
            found=type(raw).__name__,
            do="write it as docs/blend.md shows",
        )
    return Blend(**{str(key): value for key, value in raw.items()})


def read_yaml(path: Path) -> Any:
    """Read the content of a YAML or JSON file.

    Raises:
        UserError: no such file, or not readable as YAML or JSON.
    """
    import yaml

    try:
        return parse_yaml(read_small_file(path))  # JSON is YAML
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(
            f"cannot read the blend {path}",
            expected="YAML or JSON",
            found=str(error),
            do="write it as docs/blend.md shows",
        ) from None


def _blend_of_stage(blend: Blend, name: str, stage: Stage) -> Blend:
    """The blend that is read during one stage.

    Raises:
        UserError: it names a domain that the blend has not, or its shares do not go with its domains.
    """
    known = [domain.name for domain in blend.trained]
    for other in stage.weights:
        if other not in known:
            raise unknown_name(f"domain in the weights of stage {name}", other, known, f"one of {', '.join(known)}")
    share = blend.replay_share if stage.replay_share is None else stage.replay_share
    named = {domain.role for domain in blend.trained if domain.name in stage.weights}
    domains = [
        domain.model_copy(update={"weight": stage.weights[domain.name]}) if domain.role in named else domain
        for domain in blend.trained
        if domain.name in stage.weights
        or domain.role not in named
        and (domain.role == "new" and share < 1 or domain.role == "replay" and share > 0)
    ]
    try:
        return Blend(domains=[*domains, *blend.watched], replay_share=share, epochs_cap=blend.epochs_cap)
    except UserError as error:
        raise UserError(
            f"stage {name}: {error.what}", expected=error.expected, found=error.found, do=error.do
        ) from None


def _check_names(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            "two domains have the same name",
            expected="a different name for each domain",
            found=", ".join(twice),
            do="rename one of them, or remove it",
        )


def _check_weight(domain: Domain) -> None:
    if domain.role == "watch" and domain.weight:
        raise UserError(
            f"the watched domain {domain.name} has a weight",
            expected="no weight: a watched domain is validated and never trained on",
            found=f"weight: {domain.weight:g}",
            do="leave the weight out, or role: replay to train on it",
        )
    if domain.role != "watch" and domain.weight == 0:
        raise UserError(
            f"the {domain.role} domain {domain.name} has a weight of 0",
            expected="a weight above 0, or none",
            found="weight: 0",
            do="role: watch, to validate the domain without training on it",
        )


def _check_share(blend: Blend) -> None:
    """Each role gets tokens exactly when it has a domain."""
    roles = {domain.role for domain in blend.domains}
    share = blend.replay_share
    if share > 0 and "replay" not in roles:
        raise UserError(
            "a replay share without a replay domain",
            expected="a domain of role replay",
            found=f"replay_share={share}",
            do="add a domain with role: replay, or replay_share: 0",
        )
    if share == 0 and "replay" in roles:
        raise UserError(
            "a replay domain without a share",
            expected="replay_share above 0",
            found=", ".join(domain.name for domain in blend.domains if domain.role == "replay"),
            do="replay_share: 0.05 (5% of tokens)",
        )
    if share == 1 and "new" in roles:
        raise UserError(
            "nothing is left for the new domains",
            expected="replay_share below 1",
            found="replay_share=1",
            do="replay_share: 0.25",
        )
    if share < 1 and "new" not in roles:
        raise UserError(
            "the shares do not add up to 1",
            expected="a domain of role new",
            found=f"only {' and '.join(sorted(roles))} domains, with a replay share of {share}",
            do="add a domain with role: new, or replay_share: 1",
        )


def _validation_error(error: ValidationError) -> UserError:
    """Pydantic's findings as one UserError, each with the path of its field."""
    rows = error.errors(include_url=False)
    paths = [
        "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in row["loc"]).lstrip(".") for row in rows
    ]
    return UserError(
        f"the blend is wrong at {', '.join(paths)}",
        expected=f"the keys {', '.join(Blend.model_fields)}; in a domain: {', '.join(Domain.model_fields)};"
        f" in a stage: {', '.join(Stage.model_fields)}",
        found="; ".join(
            f"{path}: {row['msg']} (it is {row['input']!r:.60})" for path, row in zip(paths, rows, strict=True)
        ),
        do="correct it in the blend's file",
    )
