"""`a.b.c=value` on the command line: NeMo-Run's syntax, applied strictly.

NeMo-Run itself accepts a name that no constructor knows wherever `**kwargs` would swallow it. Here an
unknown path or a value of the wrong type is an error, with the nearest name that exists.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from recipes.plan import Plan

if TYPE_CHECKING:
    import nemo_run as run

_WORD = re.compile(r"^(?P<path>[A-Za-z_][\w.\[\]]*?)\s*(?P<op>[-+*/|&]?=)(?P<value>.*)$", re.S)


def split(word: str) -> tuple[str, str, str]:
    """`path`, operator and value of one override.

    Raises:
        UserError: the word is not of the form path=value.
    """
    match = _WORD.match(word)
    if not match:
        raise UserError(
            f"cannot read {word!r}",
            expected="an override path=value, such as data.micro_batch_size=2",
            found=repr(word),
            do="python launch.py --help shows the options; an option starts with --",
        )
    return match["path"], match["op"], match["value"]


def early(plan: Plan, words: tuple[str, ...]) -> Plan:
    """The plan as the overrides will leave it, as far as plain numbers tell (for preflight, before NeMo)."""
    for word in words:
        path, op, value = split(word)
        if path not in plan.values() or op != "=":
            continue
        old = plan.values()[path]
        try:
            plan = plan.replace(path, _read(value.strip("'\""), _kind(path, old)))
        except ValueError:
            raise _wrong_type(word, _kind(path, old).__name__, value) from None
    return plan


def _kind(path: str, old: Any) -> type:
    """The type of a plan number; optional ones are text, save these."""
    optional = {"data.replay_share": float, "trainer.strategy.virtual_pipeline_model_parallel_size": int}
    if path in optional:
        return optional[path]
    return str if old is None or isinstance(old, dict) else type(old)


def _read(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)


def apply(recipe: run.Partial, words: tuple[str, ...]) -> list[str]:
    """Apply the overrides to `recipe` in place.

    Returns:
        one line per override: `path: old -> new`.

    Raises:
        UserError: unknown path, wrong type, or a value NeMo-Run cannot read.
    """
    from nemo_run.cli.cli_parser import CLIException, logger, parse_cli_args

    logger.setLevel("CRITICAL")  # it prints what is raised here, in its own words
    lines = []
    for word in words:
        path, _, value = split(word)
        owner, leaf = _walk(recipe, path)
        old = getattr(owner, leaf, None)
        try:
            parse_cli_args(recipe, [word])
        except (CLIException, ValueError, TypeError):
            if not _set_mislabelled_float(owner, leaf, word):
                raise _wrong_type(word, _expected(owner, leaf), value) from None
        new = getattr(owner, leaf)
        if type(old) in (int, float) and isinstance(new, str):  # Union[..., str, int]: NeMo-Run keeps the text
            with contextlib.suppress(ValueError):
                new = int(new) if type(old) is int else float(new)
                setattr(owner, leaf, new)
        if isinstance(old, (int, float)) and not isinstance(new, (int, float, type(None))):
            raise _wrong_type(word, type(old).__name__, value)
        lines.append(f"{path}: {old!r} -> {new!r}")
    return lines


def _set_mislabelled_float(owner: Any, leaf: str, word: str) -> bool:
    """NeMo labels some floats `int` (Qwen2Config.init_method_std: int = 0.02): the default tells the type."""
    _, op, value = split(word)
    default = inspect.signature(owner.__fn_or_cls__).parameters.get(leaf)
    if op != "=" or default is None or not isinstance(default.default, float):
        return False
    try:
        setattr(owner, leaf, float(value))
    except ValueError:
        return False
    return True


def _walk(recipe: Any, path: str) -> tuple[Any, str]:
    """The config that holds the last name of `path`, every name checked on the way."""
    owner, seen = recipe, ""
    *steps, leaf = path.split(".")
    for step in steps:
        name, *indices = re.split(r"[\[\]]+", step.rstrip("]"))
        _check(owner, name, seen, path)
        owner = getattr(owner, name)
        for index in indices:
            try:
                owner = owner[int(index)]
            except (IndexError, KeyError, TypeError, ValueError):
                raise _unknown(path, f"{seen}{step}", []) from None
        seen += step + "."
        if not hasattr(owner, "__fn_or_cls__"):
            raise _unknown(path, seen.rstrip("."), [])
    _check(owner, leaf, seen, path)
    return owner, leaf


def _check(owner: Any, name: str, seen: str, path: str) -> None:
    known = _names(owner)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        rest = path[len(seen + name) :]
        raise _unknown(path, seen + name, [seen + other + rest for other in near])


def _names(owner: Any) -> list[str]:
    """Every argument the config's class really takes: signatures along its MRO, and what is set already."""
    target = owner.__fn_or_cls__
    kinds = target.__mro__ if inspect.isclass(target) else ()
    functions = [vars(kind)["__init__"] for kind in kinds if "__init__" in vars(kind)] or [target]
    names = set(owner.__arguments__)
    for function in functions:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            continue
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return sorted(names - {"self"})


def _expected(owner: Any, leaf: str) -> str:
    try:
        annotation = inspect.signature(owner.__fn_or_cls__).parameters[leaf].annotation
    except (KeyError, TypeError, ValueError):
        return "another type"
    return getattr(annotation, "__name__", None) or str(annotation)


def _unknown(path: str, broken: str, near: list[str]) -> UserError:
    return UserError(
        f"unknown override path {path!r}",
        expected="a path of the recipe" + (f", such as {' or '.join(near)}" if near else ""),
        found=f"{broken!r} does not exist",
        do=f"did you mean {near[0]}=...?" if near else "--dryrun prints every path there is",
    )


def _wrong_type(word: str, expected: str, value: str) -> UserError:
    return UserError(
        f"wrong type in {word!r}",
        expected=expected,
        found=repr(value),
        do="give a value of that type; strings with special characters in quotes",
    )
