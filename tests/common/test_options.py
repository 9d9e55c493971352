"""A command whose options are the fields of a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import typer
from typer.testing import CliRunner

from common.options import option, options_from


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the command is to do."""

    dishes: list[str] = option("One or more.")
    table: int = option("The table's number.")
    to_go: bool = option("In a bag.", default=False)
    tip: float | None = option("In percent.", default=None)
    kitchen: str = "main"  # no option


@pytest.fixture
def orders() -> list[Order]:
    return []


@pytest.fixture
def app(orders: list[Order]) -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @options_from(Order, arguments=("dishes",))
    def order(request: Order) -> None:
        """Order dishes."""
        orders.append(request)

    return app


def test_fields_are_options_with_their_defaults(app: typer.Typer, orders: list[Order]) -> None:
    assert CliRunner().invoke(app, ["soup", "rice", "--table", "3"]).exit_code == 0
    assert CliRunner().invoke(app, ["tea", "--table", "4", "--to-go", "--tip", "2.5"]).exit_code == 0
    assert orders == [Order(dishes=["soup", "rice"], table=3), Order(dishes=["tea"], table=4, to_go=True, tip=2.5)]
    for words in (["--table", "3"], ["soup"], ["soup", "--table", "x"], ["soup", "--table", "3", "--kitchen", "b"]):
        assert CliRunner().invoke(app, words).exit_code == 2


def test_the_help_is_that_of_the_fields(app: typer.Typer) -> None:
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert all(words in text for words in ("Order dishes.", "One or more.", "--to-go", "In a bag.", "In percent."))
    assert "--no-to-go" not in text and "kitchen" not in text


def test_an_eof_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Click would print only "Aborted!" in its place."""
    import launch
    from recipes import registry

    def cut_off() -> None:
        raise EOFError("a file ended")

    monkeypatch.setattr(registry, "recipes", cut_off)
    with pytest.raises(RuntimeError, match="EOFError: a file ended"):
        launch._run(["recipes"])
