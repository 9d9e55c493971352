"""The progress bar of `data prepare`, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(total: int, done: int) -> Iterator[Callable[[int], None]]:
    """Show a bar of input bytes; yields the function that advances it by a number of bytes."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("tokenise"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda size: bar.advance(task, size)
