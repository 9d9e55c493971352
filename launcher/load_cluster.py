"""Read a cluster file: YAML that is checked field by field, with the line of the first error."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from common.environment.merge import Site
from common.environment.sets import TIERS
from common.errors import UserError
from common.small_files import parse_yaml, read_small_file
from launcher.cluster_file import Cluster

log = logging.getLogger("launch")


def load_cluster(path: str | Path) -> Cluster:
    """Read the cluster that the file describes.

    Raises:
        UserError: unreadable, not YAML, an unknown field, or a value that a field does not take; with its line.
    """
    try:
        text = read_small_file(path)
        rows = parse_yaml(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        repeated = _find_repeated_name(node)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as problem:
        found = str(problem)
        raise _file_error(
            path, "cannot be read", "a YAML file in UTF-8", found, "see docs/clusters for examples"
        ) from None
    except yaml.YAMLError as problem:
        found = " ".join(str(problem).split())
        raise _file_error(path, "is not YAML", "name: value lines", found, "quote text that holds : # or []") from None
    if repeated:
        raise _file_error(
            path, f"line {repeated[1]}: {repeated[0]!r} is there twice", "each name once", "two", "delete one"
        )
    if not isinstance(rows, dict):
        raise _file_error(
            path, "is not a cluster", "name: value lines", type(rows).__name__, "see docs/clusters for examples"
        )
    try:
        return Cluster.model_validate(rows)
    except ValidationError as problem:
        first = problem.errors()[0]
    where = [part for part in first["loc"] if part not in ("local", "ssh") or part in _names_in(rows)]
    raise _field_error(path, node, rows, where, first)


def with_layers(name: str, cluster: Cluster | None) -> str:
    """The environment set with the layers that the cluster file adds; a tier in `name` wins."""
    layers = name.split("+")
    for layer in cluster.env_layers if cluster else ():
        if layer not in layers and not (layer in TIERS and set(layers) & set(TIERS)):
            log.info("env: %s is added (the cluster file's)", layer)
            layers.append(layer)
    return "+".join(layers)


def load_site(name: str | None, path: Path, *, elsewhere: bool) -> tuple[str, Site]:
    """The environment set and the machines that a run with this cluster file would have, for `launch.py env`.

    Args:
        elsewhere: they are not this machine (common/environment/merge.py).

    Raises:
        UserError: as `load_cluster`.
    """
    cluster = load_cluster(path)
    return with_layers(name or "base", cluster), Site(cluster.env, str(path), elsewhere=elsewhere)


def _field_error(path: str | Path, node: Any, rows: Any, where: list[Any], first: Any) -> UserError:
    """The first error that pydantic found, with its line in the file and what to do."""
    shown = [part for part in where if part != "[key]" and not _is_type_word(part)]
    name, line = ".".join(map(str, shown)) or "the file", _line(node, shown)
    head = f"line {line}: {name}" if line else name
    found = repr(first["input"])
    if first["type"] == "extra_forbidden":
        known = _fields(shown[:-1])
        near = difflib.get_close_matches(str(shown[-1]), known, n=1, cutoff=0.5)
        do = f"did you mean {near[0]!r}?" if near else "delete it; docs/clusters.md says what each field does"
        return _file_error(
            path, f"{head} is no field of a cluster file", "one of " + ", ".join(known), repr(shown[-1]), do
        )
    if first["type"] == "string_type":
        return _file_error(
            path, f"{head} is not text", "text", f"{found}, which YAML reads as no text", "write it in quotes"
        )
    if first["type"] == "string_pattern_mismatch":
        wanted = f"text that matches {first['ctx']['pattern']}"
        return _file_error(path, f"{head} cannot be used safely", wanted, found, "use plain characters")
    return _file_error(path, f"{head}: {first['msg']}", first["msg"], found, "correct the value; see docs/clusters.md")


def _file_error(path: str | Path, problem: str, expected: str, found: str, do: str) -> UserError:
    return UserError(f"cluster file {path}: {problem}", expected=expected, found=found[:300], do=do)


def _is_type_word(part: Any) -> bool:
    """Whether pydantic has put the branch of a union into the location: `literal[True]`, `function-before[...]`."""
    return isinstance(part, str) and "[" in part


def _names_in(rows: Any) -> set[Any]:
    return set(rows) if isinstance(rows, dict) else set()


def _fields(where: list[Any]) -> list[str]:
    """The fields of the file, or of one of its parts (of each kind that the part may be)."""
    of = Cluster.model_fields[where[0]].annotation if where else Cluster
    kinds = [kind for kind in (of, *get_args(of)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return sorted({field for kind in kinds for field in kind.model_fields})


def _line(node: Any, where: list[Any]) -> int | None:
    """Line number of the deepest part of `where` that the file has."""
    line = None
    for part in where:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _find_repeated_name(node: Any) -> tuple[str, int] | None:
    """The first name that one mapping has twice, and its line; YAML itself silently takes the last value."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen if isinstance(key.value, str) else False:
                return key.value, key.start_mark.line + 1
            seen.add(str(key.value))
            if (found := _find_repeated_name(value)) is not None:
                return found
    elif isinstance(node, yaml.SequenceNode):
        for child in node.value:
            if (found := _find_repeated_name(child)) is not None:
                return found
    return None
