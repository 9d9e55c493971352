"""A run described in a file: `--config FILE.yaml`, and runs/NAME/run.yaml, which repeats the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from common.errors import UserError
from common.quantities import parse_count
from common.small_files import parse_yaml, read_small_file
from common.spec import RunSpec


class RunFile(BaseModel):
    """What `--config FILE.yaml` may hold; every key but `recipe` is an option of `launch.py train`.

    Args:
        tokens, tokens_per_step: a number, or text such as 2B.
        overrides: path -> value of the recipe's numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    recipe: str | None = None
    name: str | None = None
    executor: str | None = None
    cluster: str | None = None
    env: str | None = None
    profile: str | None = None
    memory_profile: str | None = None
    tokens: int | str | None = None
    tokens_per_step: int | str | None = None
    runs: str = "runs"
    gates: bool = True
    retries: NonNegativeInt = 0
    retry_wait: NonNegativeFloat = 10.0
    overrides: dict[str, Any] = {}


def load(path: Path) -> RunSpec:
    """The spec that a file describes; its recipe is empty where the file names none.

    Raises:
        UserError: no such file, no YAML, or a key or a type that is not known.
    """
    try:
        found = RunFile.model_validate(parse_yaml(read_small_file(path)) or {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as problem:
        raise UserError(
            f"cannot read the run file {path}",
            expected="YAML with recipe, name, overrides, ... (docs/run-file.md)",
            found=str(problem),
            do="correct the file, or name the recipe with --recipe",
        ) from None
    except ValidationError as problem:
        rows = problem.errors(include_url=False)
        wrong = "; ".join(f"{'.'.join(map(str, row['loc']))}: {row['msg']}" for row in rows)
        raise UserError(
            f"the run file {path} is wrong",
            expected="the keys " + ", ".join(RunFile.model_fields),
            found=wrong,
            do="correct these lines",
        ) from None
    fields = found.model_dump(exclude={"overrides"})
    for option in ("tokens", "tokens_per_step"):
        if fields[option] is not None:
            fields[option] = parse_count(str(fields[option]), "--" + option.replace("_", "-"))
    words = tuple(f"{key}={_as_word(value)}" for key, value in found.overrides.items())
    return RunSpec(**{**fields, "recipe": found.recipe or "", "overrides": words})


def _as_word(value: Any) -> str:
    """A YAML value as it is typed on the command line."""
    return value if isinstance(value, str) else repr(value)


def dump(spec: RunSpec) -> str:
    """The file that repeats a run."""
    names = [name for name in RunFile.model_fields if name != "overrides"]
    defaults = RunFile()
    given = {name: getattr(spec, name) for name in names if getattr(spec, name) != getattr(defaults, name)}
    words = dict(word.split("=", 1) for word in spec.overrides)
    lines: str = yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    if words:
        lines += yaml.safe_dump({"overrides": words}, sort_keys=False, allow_unicode=True)
    return "# repeats this run: python launch.py --config FILE --name ANOTHER\n" + lines


def merge(described: RunSpec, given: dict[str, Any], overrides: tuple[str, ...]) -> RunSpec:
    """The file's spec with what the command line gives beside it, which wins.

    Raises:
        UserError: neither names a recipe.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if not asked.get("recipe", described.recipe):
        raise UserError(
            "no recipe is named",
            expected="--recipe NAME, or recipe: NAME in the file of --config",
            found="neither",
            do="python launch.py recipes lists the names",
        )
    return dataclasses.replace(described, **asked, overrides=(*described.overrides, *overrides))
