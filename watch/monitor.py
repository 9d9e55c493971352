"""`launch.py monitor` and `launch.py list`: how a run goes, and which runs there are. Both only read files."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from common.checkpoint_files import find_damage, has_list
from common.errors import UserError
from common.quantities import format_duration
from common.run_status import read_clock
from common.rundir import RUNS, RunDir
from watch.page import page
from watch.records import Records, list_runs, read_records
from watch.snapshot import Snapshot, take_snapshot

_LEAST_INTERVAL_S = 0.2
_PLAIN_WIDTH = 140
_LONGEST_REASON = 60


def monitor(run: RunDir, *, interval_s: float = 5.0, as_json: bool = False, once: bool = False) -> None:
    """Show a run until it ends or Ctrl-C: a live page, plain text once, or one JSON object per interval.

    Args:
        interval_s: seconds between two looks.
        as_json: print one JSON object per look on standard output.
        once: look once; also what happens where the output is no terminal, unless `as_json` is given.

    Raises:
        UserError: an interval that is too short.
    """
    if interval_s < _LEAST_INTERVAL_S:
        raise UserError(
            "--interval: too short",
            expected=f"at least {_LEAST_INTERVAL_S} s",
            found=f"{interval_s:g}",
            do="--interval 5",
        )
    console = output_console()
    snapshot = take_snapshot(run)
    if as_json:
        _print_json(run, snapshot, interval_s, once)
    elif once or not console.is_terminal:
        console.print(page(snapshot))
    else:
        _show_live(run, snapshot, interval_s, console)


def output_console() -> Console:
    """Standard output; where it is no terminal, wide enough for a line of a log."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _print_json(run: RunDir, snapshot: Snapshot, interval_s: float, once: bool) -> None:
    print(json.dumps(snapshot.to_row()), flush=True)
    while not (once or snapshot.is_over):
        time.sleep(interval_s)
        snapshot = take_snapshot(run)
        print(json.dumps(snapshot.to_row()), flush=True)


def _show_live(run: RunDir, snapshot: Snapshot, interval_s: float, console: Console) -> None:
    with Live(page(snapshot), console=console, auto_refresh=False) as live:
        while not snapshot.is_over:
            try:
                time.sleep(interval_s)
            except KeyboardInterrupt:  # the page stays; the run goes on
                return
            snapshot = take_snapshot(run)
            live.update(page(snapshot), refresh=True)


def runs_table(root: Path = RUNS) -> Table:
    """All runs, newest first: state, step, loss, age."""
    now = time.time()
    table = Table(box=None, header_style="dim")
    for name in ("run", "state", "step", "loss", "checkpoint", "last write"):
        table.add_column(name, justify="right" if name in ("step", "loss") else "left", overflow="fold")
    for run in list_runs(root):
        records = read_records(run)
        status, loss = records.status, _newest_loss(records)
        why = f": {_shorten(status.ending.summary)}" if status.ending and status.ending.summary else ""
        table.add_row(
            run.name,
            status.state(read_clock(run.status)) + why,
            f"{status.step:,}/{status.max_steps:,}",
            f"{loss:.4f}" if loss is not None else "",
            status.checkpoint,
            f"{format_duration(now - status.updated)} ago" if status.updated else "",
        )
    return table


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def _newest_loss(records: Records) -> float | None:
    return records.training[-1]["loss"] if records.training else records.status.loss


def checkpoints_table(run: RunDir, *, verify: bool = False) -> tuple[Table, bool]:
    """The checkpoints of a run, oldest first: whole or not, validation loss, size, age.

    Args:
        verify: read every file, and show whether it is as it was saved.

    Returns:
        the table, and whether no complete checkpoint is damaged (True if not asked).
    """
    now, whole = time.time(), set(run.complete_checkpoints())
    losses = {row["step"]: row.get("val_loss") for row in read_records(run).validation}
    damage = {folder: find_damage(folder) for folder in whole} if verify else {}
    table = Table(box=None, header_style="dim")
    for name in ("checkpoint", "whole", "validation", "GiB", "age", *(["files"] if verify else [])):
        table.add_column(name, justify="right" if name in ("validation", "GiB") else "left")
    folders = [path for path in run.checkpoints.glob("*step-*") if path.is_dir()]
    for folder in sorted(folders, key=lambda path: (path not in whole, path.stat().st_mtime)):
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        step = folder.name.rpartition("step-")[2]
        loss = losses.get(int(step)) if step.isdigit() else None
        table.add_row(
            folder.name,
            "yes" if folder in whole else "no",
            f"{loss:.4f}" if loss is not None else "",
            f"{sum(file.st_size for file in files) / 2**30:.2f}",
            format_duration(now - max((file.st_mtime for file in files), default=now)),
            *([_state_of_files(folder, damage)] if verify else []),
        )
    return table, not any(damage.values())


def _state_of_files(checkpoint: Path, damage: dict[Path, list[str]]) -> str:
    if checkpoint not in damage:
        return "not looked at"
    if damage[checkpoint]:
        return "DAMAGED: " + "; ".join(damage[checkpoint])
    return "as saved" if has_list(checkpoint) else "of full length (no checksums were recorded)"
