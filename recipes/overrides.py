"""`a.b.c=value` on the command line: NeMo-Run's syntax, applied strictly.

Words are parsed once (`parse`). What they change of the plan is known before NeMo is imported (`apply_to_plan`), and
all of them are applied to NeMo-Run's configuration (`apply_to_recipe`). NeMo-Run itself accepts a name that no
constructor knows wherever `**kwargs` would swallow it. Here an unknown path or a value of the wrong type is an error,
with the nearest name that exists.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import inspect
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from common.commands import launch_command
from common.errors import UserError
from recipes.plan import PATHS, Plan, type_at

if TYPE_CHECKING:
    import nemo_run as run

_WORD = re.compile(r"^(?P<path>[A-Za-z_][\w.\[\]]*?)\s*(?P<operator>[-+*/|&]?=)(?P<text>.*)$", re.S)
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+=": operator.add,
    "-=": operator.sub,
    "*=": operator.mul,
    "/=": operator.truediv,
}


# what NeMo-Run's configuration of a run consists of: the parameters of training/pretrain.py
SLOTS = ("model", "data", "trainer", "log", "resume", "optim", "speed", "evaluate")
# paths that the launcher sets, and how to say what a user may mean by them
_OWNED = {
    "log.explicit_log_dir": "--runs DIR puts all runs, with their logs, into another folder",
    "log.ckpt.dirpath": "--runs DIR puts all runs, with their checkpoints, into another folder",
    "log.tensorboard.save_dir": "--runs DIR puts all runs, with their TensorBoard files, into another folder",
    "log.wandb": "log.loggers=wandb, which can neither stop nor delay the training (docs/loggers.md)",
    "resume.resume_from_path": "python launch.py resume RUN",
    "trainer.callbacks": "trainer.callbacks+=[...] adds callbacks; --no-gates leaves the truth gates out",
}


@dataclass(frozen=True)
class Override:
    """One word of the command line: `path`, an operator such as `=` or `*=`, and the text of the value."""

    path: str
    operator: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}{self.operator}{self.text}"


def parse(words: Iterable[str]) -> tuple[Override, ...]:
    """The words as overrides, in their order; the last part of a path is enough where only one path ends so.

    Raises:
        UserError: a word is not of the form path=value, its last part alone is ambiguous, or the launcher sets that
            path itself.
    """
    return tuple(_complete(_parse(word)) for word in words)


def _parse(word: str) -> Override:
    match = _WORD.match(word)
    if not match:
        raise UserError(
            f"cannot read {word!r}",
            expected="an override path=value, such as data.micro_batch_size=2",
            found=repr(word),
            do="python launch.py --help shows the options; an option starts with --",
        )
    return Override(match["path"], match["operator"], match["text"])


def _complete(override: Override) -> Override:
    """`max_steps=50` as `trainer.max_steps=50`."""
    if override.path in _OWNED and override.operator == "=":
        raise UserError(
            f"{override.path} is set by the launcher",
            expected="a path of the recipe's own",
            found=str(override),
            do=_OWNED[override.path],
        )
    first = re.split(r"[.\[]", override.path)[0]
    if "." in override.path and first in SLOTS or override.path in PATHS:
        return override
    ends = [path for path in PATHS if path.rpartition(".")[2] == override.path]
    if len(ends) > 1:
        raise UserError(
            f"{override.path!r} is the last part of several paths",
            expected="one of " + ", ".join(ends),
            found=repr(str(override)),
            do=f"{ends[0]}{override.operator}{override.text}",
        )
    if not ends and first not in SLOTS:  # known before NeMo is imported; the other names are not
        last = {path.rpartition(".")[2]: path for path in PATHS}
        near = difflib.get_close_matches(override.path.rpartition(".")[2], last, n=1, cutoff=0.6)
        raise unknown_path(override, first, [last[name] for name in near])
    return dataclasses.replace(override, path=ends[0]) if ends else override


def apply_to_plan(plan: Plan, overrides: Iterable[Override]) -> Plan:
    """The plan as the overrides leave it.

    Raises:
        UserError: a value that is not of the type of the plan's number.
    """
    for override in overrides:
        if override.path in PATHS:
            plan = plan.replace(override.path, _value(plan, override))
    return plan


def _value(plan: Plan, override: Override) -> Any:
    """The plan's new number, by the type of its field."""
    kind, optional = type_at(override.path)
    text = override.text.strip("'\"")
    if optional and override.operator == "=" and text == "None":
        return None
    old = plan.values()[override.path]
    try:
        if override.path.startswith("data.") and text.startswith(("{", "[")):  # data.blend is also the path of a file
            return ast.literal_eval(text)
        value = _read(text, kind)
        if override.operator != "=":
            value = kind(_ARITHMETIC[override.operator](old, value))
    except (ValueError, TypeError, KeyError, SyntaxError, ZeroDivisionError):
        raise _wrong_type(override, kind.__name__, old) from None
    return value


def _read(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(text)
        return text.lower() == "true"
    return kind(text)


def apply_to_recipe(recipe: run.Partial, overrides: Iterable[Override], declared: Plan | None = None) -> list[str]:
    """Apply the overrides to `recipe` in place.

    Args:
        recipe: built from the plan that the overrides had changed already, or from `declared`.
        declared: the plan before the overrides, for the old values in the returned lines.

    Returns:
        one line per override: `path: old -> new`.

    Raises:
        UserError: unknown path, wrong type, or a value NeMo-Run cannot read.
    """
    before = declared.values() if declared is not None else {}
    lines = []
    for override in overrides:
        owner, leaf = _find(recipe, override)
        old = before.get(override.path, getattr(owner, leaf, None))
        if override.path in before and override.operator != "=":
            setattr(owner, leaf, old)  # the recipe was built with the result; apply the operator to the old number
        _set(recipe, owner, leaf, override)
        before[override.path] = getattr(owner, leaf)
        lines.append(f"{override.path}: {old!r} -> {getattr(owner, leaf)!r}")
    return lines


def _set(recipe: run.Partial, owner: Any, leaf: str, override: Override) -> None:
    """Let NeMo-Run read the value, and see to it that it keeps the type of the old one."""
    from nemo_run.cli.cli_parser import CLIException, logger, parse_cli_args

    logger.setLevel("CRITICAL")  # it prints what is raised here, in its own words
    old = getattr(owner, leaf, None)
    try:
        parse_cli_args(recipe, [str(override)])
    except (CLIException, ValueError, TypeError):
        if not (_set_mislabelled_float(owner, leaf, override) or _set_stock_config(recipe, old, override)):
            raise _wrong_type(override, _expected(owner, leaf), old) from None
    new = getattr(owner, leaf)
    if type(old) in (int, float) and isinstance(new, str):  # Union[..., str, int]: NeMo-Run keeps the text
        with contextlib.suppress(ValueError):
            new = int(new) if type(old) is int else float(new)
            setattr(owner, leaf, new)
    if isinstance(old, (int, float)) and not isinstance(new, (int, float, type(None))):
        raise _wrong_type(override, type(old).__name__, old)


def _set_stock_config(recipe: run.Partial, old: Any, override: Override) -> bool:
    """NeMo names configurations (`data=mock`); NeMo-Run knows the names once all of NeMo's recipes are imported."""
    from nemo.collections import llm
    from nemo_run.cli.cli_parser import CLIException, parse_cli_args

    if not (hasattr(old, "__fn_or_cls__") and override.text.isidentifier()):
        return False
    dir(llm)  # imports them: common/lazy_imports.py had left it
    try:
        parse_cli_args(recipe, [str(override)])
    except (CLIException, ValueError, TypeError):
        return False
    return True


def _set_mislabelled_float(owner: Any, leaf: str, override: Override) -> bool:
    """NeMo labels some floats `int` (Qwen2Config.init_method_std: int = 0.02): the type of the default decides."""
    default = inspect.signature(owner.__fn_or_cls__).parameters.get(leaf)
    if override.operator != "=" or default is None or not isinstance(default.default, float):
        return False
    try:
        setattr(owner, leaf, float(override.text))
    except ValueError:
        return False
    return True


def _find(recipe: Any, override: Override) -> tuple[Any, str]:
    """The config that holds the last name of the override's path, every name checked on the way."""
    owner, seen = recipe, ""
    *steps, leaf = override.path.split(".")
    for step in steps:
        name, *indices = re.split(r"[\[\]]+", step.rstrip("]"))
        _check(owner, name, seen, override)
        owner = getattr(owner, name)
        for index in indices:
            try:
                owner = owner[int(index)]
            except (IndexError, KeyError, TypeError, ValueError):
                raise unknown_path(override, f"{seen}{step}", []) from None
        seen += step + "."
        if not hasattr(owner, "__fn_or_cls__"):
            raise unknown_path(override, seen.rstrip("."), [])
    _check(owner, leaf, seen, override)
    return owner, leaf


def _check(owner: Any, name: str, seen: str, override: Override) -> None:
    known = names_of(owner)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        rest = override.path[len(seen + name) :]
        raise unknown_path(override, seen + name, [seen + other + rest for other in near])


def names_of(owner: Any) -> list[str]:
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


def unknown_path(override: Override, broken: str, near: list[str]) -> UserError:
    """The error for an override of a path that does not exist.

    Args:
        broken: the part of the path up to the first unknown name.
        near: similar paths that exist, the nearest first.
    """
    path, rest = override.path, f"{override.operator}{override.text}"
    return UserError(
        f"unknown override path {path!r}",
        expected="a path of the recipe" + (f", such as {' or '.join(near)}" if near else ""),
        found=f"{broken!r} does not exist",
        do=f"did you mean {near[0]}{rest}?" if near else f"{launch_command('paths')} RECIPE lists every path there is",
    )


def _wrong_type(override: Override, expected: str, old: Any) -> UserError:
    return UserError(
        f"wrong type in {str(override)!r}",
        expected=f"a value of type {expected} (text with special characters in quotes)",
        found=repr(override.text),
        do=f"{override.path}={old}, as the recipe has it, or another value of that type",
    )
