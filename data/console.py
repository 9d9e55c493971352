"""Words and a bar for the person at the terminal, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def tell(text: str) -> None:
    """Say something to the person, on standard error."""
    from rich.console import Console

    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(text)


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar over input bytes on standard error; yields the function that moves it on."""
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("tokenise"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda size: bar.advance(task, size)
