"""The first page of help: how to train, and the commands grouped by when they are used."""

from __future__ import annotations

from typing import Any

import typer.core

EXAMPLES = """\
  python launch.py --recipe qwen25_500m_single
  python launch.py --recipe qwen25_500m_cpt --name mine trainer.max_steps=500
  python launch.py resume mine [PATH=VALUE]...                 # continue it; changes are shown
"""
RARE = ("--retry-wait", "--change-blend")  # options that `train -h` and `resume -h` show, and the first page does not
PANELS = ("Before training", "While it runs", "Afterwards", "This machine")


class FullSummaries(typer.core.TyperGroup):
    """A command group whose help shows the whole first line of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line per command.

        Args:
            ctx, formatter: click's Context and HelpFormatter.
        """
        formatter.width = 100
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(limit=200)) for name, one in self.commands.items()])


class GroupedHelp(typer.core.TyperGroup):
    """A command group whose help shows the options of `train` and one line per command, also of groups inside it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; click would print nothing but "Aborted!" for an EOFError, such as that of a cut-off file."""
        try:
            return super().invoke(ctx)
        except EOFError as error:
            raise RuntimeError(f"EOFError: {error}") from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the whole page, which fits one screen of a terminal that is 100 columns wide.

        Args:
            ctx, formatter: click's Context and HelpFormatter (of typer's own click from typer 0.29 on).
        """
        formatter.width = 100
        formatter.write(f"{self.help}\n\nTrain:\n{EXAMPLES}")
        train = self.commands["train"]
        options = [row for parameter in train.params if (row := parameter.get_help_record(ctx))]
        options = [(name, text) for name, text in options if name.split()[0] not in RARE]
        formatter.indent()
        formatter.write_dl([(name.removesuffix(" <list[str]>"), text.split("  [")[0]) for name, text in options])
        formatter.dedent()
        for panel in PANELS:
            if rows := self._rows(panel):
                formatter.write(f"{panel}:\n")
                formatter.indent()
                formatter.write_dl(rows)
                formatter.dedent()
        formatter.write("COMMAND -h shows a command's options; --install-completion completes them in your shell.\n")

    def _rows(self, panel: str) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for name, command in self.commands.items():
            if getattr(command, "rich_help_panel", None) == panel and not command.hidden:
                rows += _lines(name, command)
        return rows


def _lines(name: str, command: Any) -> list[tuple[str, str]]:
    """One line for a command, or one for each command of a group."""
    inside = getattr(command, "commands", None)
    if inside is None:
        return [(name, command.get_short_help_str(limit=90))]
    return [row for sub, one in inside.items() for row in _lines(f"{name} {sub}", one)]
