"""Command-line options from the fields of a dataclass: a default and its help text have one home."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer

_Request = TypeVar("_Request")


def options_from(
    request: type[_Request], arguments: Sequence[str] = ()
) -> Callable[[Callable[[_Request], None]], Callable[..., None]]:
    """Decorator: make a function of one `request` into a Typer command with an option per field of the dataclass.

    Args:
        request: a dataclass; a field is an option if its metadata has a text for the key "help".
        arguments: the fields that are arguments without a name instead.
    """
    types = typing.get_type_hints(request)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=Annotated[types[field.name], _typer_parameter(field, types[field.name], arguments)],
        )
        for field in dataclasses.fields(request)  # type: ignore[arg-type]
        if "help" in field.metadata
    ]

    def decorate(function: Callable[[_Request], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**options: Any) -> None:
            function(request(**options))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _typer_parameter(field: dataclasses.Field[Any], kind: Any, arguments: Sequence[str]) -> Any:
    text = field.metadata["help"]
    if field.name in arguments:
        return typer.Argument(help=text)
    name = "--" + field.name.replace("_", "-")
    return typer.Option(name, help=text) if kind is bool else typer.Option(help=text)  # without a --no-NAME
