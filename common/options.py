"""Command-line options from the fields of a dataclass: a default and its help text have one home."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

_Request = TypeVar("_Request")


def option(text: str, *, metavar: str | None = None, **default: Any) -> Any:
    """A dataclass field that `options_from` makes an option or argument of.

    Args:
        text: its help, in one line.
        metavar: stands for the value in the help; default: the value's type.
        default: `default=...`; without it the command requires the option.
    """
    return dataclasses.field(metadata={"help": text, "metavar": metavar}, **default)


def options_from(
    request: type[_Request], arguments: Sequence[str] = ()
) -> Callable[[Callable[[_Request], None]], Callable[..., None]]:
    """Decorator: make a function of one `request` into a Typer command with an option per field of the dataclass.

    Args:
        request: a dataclass; a field is an option if its metadata has a text for the key "help".
        arguments: the fields that are arguments without a name instead, in the order in which they are typed.
    """
    types = typing.get_type_hints(request)
    fields = [field for field in dataclasses.fields(request) if "help" in field.metadata]  # type: ignore[arg-type]
    own = vars(request).get("__annotations__", {})  # shown before what the class inherits
    fields.sort(key=lambda field: (_place(field.name, arguments), field.name not in own))
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=Annotated[types[field.name], _typer_parameter(field, types[field.name], arguments)],
        )
        for field in fields
    ]

    def decorate(function: Callable[[_Request], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**options: Any) -> None:
            function(request(**options))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _place(name: str, arguments: Sequence[str]) -> int:
    """Arguments in their order, then the options."""
    return arguments.index(name) if name in arguments else len(arguments)


def _typer_parameter(field: dataclasses.Field[Any], kind: Any, arguments: Sequence[str]) -> Any:
    import typer  # here, because a worker process imports the requests and no command line

    text, metavar = field.metadata["help"], field.metadata["metavar"]
    if field.name in arguments:
        return typer.Argument(help=text, metavar=metavar)
    name = "--" + field.name.rstrip("_").replace("_", "-")  # from_ is --from, which Python keeps for itself
    return typer.Option(name, help=text, metavar=None if kind is bool else metavar)  # without a --no-NAME
