"""The page that the monitor shows, made of a snapshot: for a terminal, or as plain text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common import run_status
from common.domain_losses import NOT_TRAINED, format_change
from common.metric_rows import Row
from common.quantities import format_duration
from common.run_status import Heartbeat
from watch.snapshot import Snapshot

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    run_status.DONE: "green",
    run_status.FAILED: "red",
    run_status.SILENT: "red",
    run_status.INTERRUPTED: "yellow",
    run_status.RETRYING: "yellow",
}
_BAR_WIDTH = 30
_MOST_RANKS = 8  # shown one by one


def page(snapshot: Snapshot) -> RenderableType:
    """Everything about a run on one screen."""
    parts: list[RenderableType] = [_head(snapshot), _progress(snapshot), *_rates(snapshot)]
    if gpus := [(row, gpu) for row in snapshot.newest_samples() for gpu in row.get("gpus", [])]:
        parts.append(_gpu_table(gpus))
    parts += [_line("node", text) for text in _nodes(snapshot)]
    parts += [_line("ranks", text) for text in _ranks(snapshot)]
    parts.append(_line("checkpoint", _checkpoint(snapshot)))
    parts += [Text(f"  ! {sign.text}", style="red" if sign.fatal else "yellow") for sign in snapshot.signs]
    parts += [_line("", text) for text in _ending(snapshot)]
    return Group(*parts)


def _line(name: str, text: str) -> Text:
    return Text.assemble((f"{name:>10}  ", "dim"), text)


def _head(snapshot: Snapshot) -> Text:
    status = snapshot.records.status
    state = (snapshot.state, _COLOURS.get(snapshot.state, "cyan"))
    ranks = f"{status.world_size} rank{'s' if status.world_size > 1 else ''}"
    where = f"  attempt {status.attempt}, {status.executor or '?'}, {ranks}"
    return Text.assemble((str(snapshot.records.run.path), "bold"), "  ", state, (where, "dim"))


def _progress(snapshot: Snapshot) -> Text:
    status = snapshot.records.status
    share = min(1.0, status.step / status.max_steps) if status.max_steps else 0.0
    full = int(share * _BAR_WIDTH)
    text = f"step {status.step:,} of {status.max_steps:,}"
    if status.eta_seconds is not None:
        text += f", {format_duration(status.eta_seconds)} to go"
    return Text.assemble(" " * 12, ("█" * full, "green"), ("░" * (_BAR_WIDTH - full), "dim"), f"{share:5.0%}  {text}")


def _rates(snapshot: Snapshot) -> Iterator[Text]:
    records, status = snapshot.records, snapshot.records.status
    losses = [row["loss"] for row in records.training[-60:] if isinstance(row["loss"], int | float)]
    if losses:
        last = f"  {losses[-1]:.4f}" + (f", lr {status.lr:.2e}" if status.lr is not None else "")
        yield _line("loss", sparkline(losses) + last)
    for position, text in enumerate(_validation(snapshot)):
        yield _line("" if position else "validation", text)
    if status.tokens_per_second is not None and status.step_seconds is not None:
        usual = records.tokens_per_second_median
        compared = f", {status.tokens_per_second / usual:.0%} of this run's median" if usual else ""
        text = f"{status.tokens_per_second:,.0f} tokens/s, {status.step_seconds:.3f} s per step"
        yield _line("rate", text + compared)


def _validation(snapshot: Snapshot) -> Iterator[str]:
    """The newest validation: a line per domain, or one for all where the run validates on a mixture only."""
    rows = snapshot.records.validation
    if not rows:
        return
    found = snapshot.validation()
    for name, domain in found.items():
        text = f"{name} {domain['loss']:.4f} in step {rows[-1]['step']}"
        if domain["verdict"] not in ("", NOT_TRAINED):
            text += f", {format_change(domain['change'], domain['change_standard_error'], 3)} {domain['verdict']}"
        yield text + (f" ({domain['tokens']:,} tokens)" if domain["tokens"] else "")
    if not found and isinstance(loss := rows[-1].get("val_loss"), int | float):
        yield f"{loss:.4f} in step {rows[-1]['step']}"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a row of bars, the highest as a full one; one that is not finite as `x`."""
    size = max(1, math.ceil(len(values) / width))
    groups = [values[at : at + size] for at in range(0, len(values), size)]
    means = [sum(group) / len(group) for group in groups]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(_BARS[int((m - low) / span * (len(_BARS) - 1))] if math.isfinite(m) else "x" for m in means)


def _gpu_table(gpus: Sequence[tuple[Row, Row]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("      GPU", "memory GiB", "use", "power W", "temp", "SM MHz", "slowed by"):
        table.add_column(name, justify="left" if name in ("      GPU", "slowed by") else "right")
    for sample, gpu in gpus:
        table.add_row(
            f"{sample.get('host', '?')}:{gpu['index']}".rjust(10),
            _of(gpu, "memory_used_gib", "memory_total_gib", ".1f"),
            f"{gpu['utilization_percent']}%" if "utilization_percent" in gpu else "",
            _of(gpu, "power_w", "power_limit_w", ".0f"),
            f"{gpu['temperature_c']} C" if "temperature_c" in gpu else "",
            _of(gpu, "sm_clock_mhz", "sm_clock_max_mhz", ".0f"),
            ", ".join(gpu.get("throttled_by", [])),
        )
    return table


def _of(gpu: Row, used: str, total: str, form: str) -> str:
    if used not in gpu:
        return ""
    return format(gpu[used], form) + (f"/{gpu[total]:{form}}" if total in gpu else "")


def _nodes(snapshot: Snapshot) -> Iterator[str]:
    for row in snapshot.newest_samples():
        parts = []
        if "host_memory_used_gib" in row:
            parts.append(f"memory {row['host_memory_used_gib']:.1f}/{row['host_memory_total_gib']:.1f} GiB")
        if ranks := row.get("rank_memory_gib"):
            parts.append(f"ranks {sum(ranks.values()):.1f} GiB")
        if "cpu_percent" in row:
            parts.append(f"CPU {row['cpu_percent']:.0f}%")
        if "disk_free_gib" in row:
            parts.append(f"disk {row['disk_free_gib']:.0f} GiB free")
        if "network_sent_mb_s" in row:
            parts.append(f"network {row['network_sent_mb_s']:.1f} out, {row['network_received_mb_s']:.1f} in MB/s")
        yield f"{row.get('host', '?')}: {', '.join(parts)}"


def _ranks(snapshot: Snapshot) -> Iterator[str]:
    """One line if all are alike; else the slowest and the silent ones by name."""
    beats = sorted(snapshot.records.status.ranks, key=lambda beat: (beat.step, beat.time))
    if not beats:
        return
    low, high = beats[0].step, beats[-1].step
    steps = f"all in step {low:,}" if low == high else f"in steps {low:,} to {high:,}"
    yield f"{len(beats)} of {snapshot.records.status.world_size}, {steps}"
    behind = [beat for beat in beats if beat.step < high - 1 or _is_silent(beat, snapshot)]
    for beat in behind[:_MOST_RANKS]:
        seen = "" if snapshot.is_over else f", last sign of life {format_duration(snapshot.time - beat.time)} ago"
        yield f"rank {beat.rank} on {beat.host}: {beat.phase}, step {beat.step:,}{seen}"


def _is_silent(beat: Heartbeat, snapshot: Snapshot) -> bool:
    return not snapshot.is_over and snapshot.time - beat.time > run_status.SILENT_AFTER_S


def _checkpoint(snapshot: Snapshot) -> str:
    status, age = snapshot.records.status, snapshot.checkpoint_age_s
    if not status.checkpoint:
        return "none yet"
    return status.checkpoint + (f", {format_duration(age)} old" if age is not None else "")


def _ending(snapshot: Snapshot) -> Iterator[str]:
    ending = snapshot.records.status.ending
    if ending is None or snapshot.records.status.phase not in run_status.ENDED:
        return
    if ending.summary:
        yield ending.summary
    if ending.advice:
        yield f"do this: {ending.advice}"
