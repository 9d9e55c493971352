"""What the numbers of a run say is wrong: loss, gradients, rates, GPUs, memory, disk, checkpoints, silent ranks.

Each rule looks at one thing and yields signs, the ones that can end a run first. The monitor shows them as warnings,
the diagnosis as causes (of a run that failed or hangs) or as notes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from common import run_status
from common.machine_facts import SHM_MINIMUM
from common.metric_rows import Row
from common.quantities import GIB
from watch.records import Records

SPIKE_NATS = 0.5  # and SPIKE_DEVIATIONS typical deviations above the rows before it
SPIKE_DEVIATIONS = 8.0
SPIKE_WINDOW = 20  # rows
GRADIENT_FACTOR = 50.0  # times the median of the rows before
SLOW_RATE = 0.7  # of the run's own median
SLOW_CLOCK = 0.85  # of the other GPUs' median
HANG_FACTOR = 10.0  # times the median step
HANG_LEAST_S = 120.0
BUSY_PERCENT = 50  # utilisation above which a GPU's clock says something
RECENT = 6  # samples: one minute
MEMORY_FULL = 0.95
THERMAL = ("software thermal slowdown", "hardware thermal slowdown", "hardware slowdown", "power brake")


@dataclass(frozen=True)
class Sign:
    """One thing that is wrong.

    Args:
        name: stable, for other programs.
        text: what is wrong, with its numbers, in one sentence.
        advice: what to do.
        file: where it was seen, a file name in the run directory.
        fatal: by itself enough to end a run or to make its result useless.
    """

    name: str
    text: str
    advice: str
    file: str
    fatal: bool = False


def find_signs(records: Records, now: float) -> list[Sign]:
    """All signs, the fatal ones first."""
    found = [
        *_loss(records),
        *_gradient_norm(records),
        *_gpus(records),
        *_host(records),
        *_checkpoints(records),
        *_silence(records, now),
        *_rate(records),
    ]
    return sorted(found, key=lambda sign: not sign.fatal)


def _loss(records: Records) -> Iterator[Sign]:
    good: Row | None = None
    for position, row in enumerate(records.training):
        loss = row["loss"]
        if not isinstance(loss, int | float) or not math.isfinite(loss):
            yield Sign("nan_loss", _broken_loss(row, good), _lower_rate(records), "metrics.jsonl", fatal=True)
            return
        before = [r["loss"] for r in records.training[max(0, position - SPIKE_WINDOW) : position]]
        good = row
        if position < SPIKE_WINDOW or position < len(records.training) - SPIKE_WINDOW:
            continue
        if (rise := _spike(loss, before)) is not None:
            text = f"the loss jumped by {rise:.2f} to {loss:.2f} in step {row['step']} at a learning rate of {_lr(row)}"
            yield Sign("loss_spike", text, _lower_rate(records), "metrics.jsonl")
            return


def _spike(loss: float, before: list[float]) -> float | None:
    """How far the loss lies above the rows before it, if that is far."""
    middle = statistics.median(before)
    deviation = statistics.median(abs(value - middle) for value in before)
    rise = loss - middle
    return rise if rise > SPIKE_NATS and rise > SPIKE_DEVIATIONS * deviation else None


def _broken_loss(row: Row, good: Row | None) -> str:
    last = f"the last good loss was {good['loss']:.2f} in step {good['step']}" if good else "no good loss before it"
    return f"the loss is not a finite number in step {row['step']} at a learning rate of {_lr(row)}; {last}"


def _lr(row: Row) -> str:
    return f"{row['lr']:.2e}" if isinstance(row.get("lr"), int | float) else "unknown size"


def _lower_rate(records: Records) -> str:
    peak = records.plan.max_lr if records.plan else 0.0
    lower = f"optim.config.lr={peak / 10:g}" if 0 < peak <= 3e-3 else "optim.config.lr=1e-4"
    return f"a lower learning rate ({lower}) or a longer warm-up, from a checkpoint before that step"


def _gradient_norm(records: Records) -> Iterator[Sign]:
    rows = [row for row in records.training if isinstance(row.get("grad_norm"), int | float)]
    last = rows[-3:]
    if len(last) == 3 and all(row["grad_norm"] == 0.0 for row in last):
        text = f"the gradient norm is 0.0 since step {last[0]['step']} or before: nothing is learned"
        yield Sign("zero_gradient", text, _CHECK_WEIGHTS, "metrics.jsonl", fatal=True)
    if len(rows) > SPIKE_WINDOW and math.isfinite(rows[-1]["grad_norm"]):
        usual = statistics.median(row["grad_norm"] for row in rows[-SPIKE_WINDOW - 1 : -1])
        now = rows[-1]["grad_norm"]
        if usual > 0 and now > GRADIENT_FACTOR * usual:
            text = f"the gradient norm rose to {now:.3g} in step {rows[-1]['step']}, from {usual:.3g}"
            yield Sign("gradient_norm", text, _lower_rate(records), "metrics.jsonl")


_CHECK_WEIGHTS = "check the checkpoint and the loss mask: gates.json, and `python launch.py passport NAME`"


def _newest_by_node(records: Records, count: int = RECENT) -> list[list[Row]]:
    """The last samples of each node, oldest first."""
    nodes: dict[int, list[Row]] = {}
    for row in records.samples:
        nodes.setdefault(int(row.get("node", 0)), []).append(row)
    return [rows[-count:] for _, rows in sorted(nodes.items())]


def _gpus(records: Records) -> Iterator[Sign]:
    clocks: list[tuple[str, float]] = []
    for rows in _newest_by_node(records):
        newest = rows[-1]
        for gpu in newest.get("gpus", []):
            name = f"GPU {gpu['index']} of {newest.get('host', '?')}"
            history = [g for row in rows for g in row.get("gpus", []) if g["index"] == gpu["index"]]
            yield from _errors(records, name, gpu)
            yield from _heat(name, history)
            if gpu.get("utilization_percent", 0) >= BUSY_PERCENT and "sm_clock_mhz" in gpu:
                clocks.append((name, statistics.median(g["sm_clock_mhz"] for g in history if "sm_clock_mhz" in g)))
    yield from _slow_gpus(clocks)


def _errors(records: Records, name: str, gpu: Row) -> Iterator[Sign]:
    first = next((g for row in records.samples for g in row.get("gpus", []) if g["index"] == gpu["index"]), gpu)
    ecc = gpu.get("ecc_uncorrected", 0) - first.get("ecc_uncorrected", 0)
    if ecc > 0:
        advice = "drain this node and reset the GPU; replace it if it comes back (nvidia-smi -q -d ECC,ROW_REMAPPER)"
        yield Sign("ecc", f"{name}: {ecc} uncorrectable memory errors since the start", advice, "system.jsonl", True)
    if gpu.get("xids"):
        numbers = ", ".join(map(str, gpu["xids"]))
        advice = "look the number up in NVIDIA's Xid list; train without this node until it is checked"
        yield Sign("xid", f"{name}: the driver reported Xid {numbers}", advice, "system.jsonl", fatal=True)


def _heat(name: str, history: list[Row]) -> Iterator[Sign]:
    hot = [g for g in history if set(g.get("throttled_by", [])) & set(THERMAL)]
    if len(hot) >= 3 and 2 * len(hot) >= len(history):
        last = hot[-1]
        reasons = ", ".join(sorted(set(last["throttled_by"]) & set(THERMAL)))
        text = f"{name} is slowed down ({reasons}) at {last.get('temperature_c', '?')} C"
        clock = f", {last['sm_clock_mhz']} of {last['sm_clock_max_mhz']} MHz" if "sm_clock_max_mhz" in last else ""
        advice = "check the node's cooling and power supply; training is right, but slow"
        yield Sign("thermal_throttling", text + clock, advice, "system.jsonl")


def _slow_gpus(clocks: list[tuple[str, float]]) -> Iterator[Sign]:
    """A GPU that computes clearly slower than the others: each step waits for it."""
    if len(clocks) < 2:
        return
    for position, (name, clock) in enumerate(clocks):
        others = statistics.median(value for at, (_, value) in enumerate(clocks) if at != position)
        if clock < SLOW_CLOCK * others:
            text = f"{name} runs at {clock:.0f} MHz, the others at {others:.0f} MHz: every step waits for it"
            advice = "check its cooling and power (nvidia-smi -q -d PERFORMANCE), or train without this node"
            yield Sign("slow_rank", text, advice, "system.jsonl")


def _host(records: Records) -> Iterator[Sign]:
    for rows in _newest_by_node(records):
        newest, host = rows[-1], rows[-1].get("host", "?")
        used, total = newest.get("host_memory_used_gib"), newest.get("host_memory_total_gib")
        if used and total and used > MEMORY_FULL * total:
            ranks = newest.get("rank_memory_gib", {})
            most = f"; the ranks here hold {sum(ranks.values()):.1f} GiB" if ranks else ""
            text = f"{host}: {used:.1f} of {total:.1f} GiB of host memory are in use{most}"
            yield Sign("host_memory", text, "fewer data workers (data.num_workers=1), or more memory", "system.jsonl")
        first = next(row for row in records.samples if row.get("node") == newest.get("node"))
        if (kills := newest.get("oom_kills", 0) - first.get("oom_kills", 0)) > 0:
            text = f"{host}: the kernel has killed {kills} process(es) for lack of memory since the start"
            advice = "ask for more host memory; fewer data workers need less (data.num_workers=1)"
            yield Sign("host_oom", text, advice, "system.jsonl", fatal=True)
        free, need = newest.get("disk_free_gib"), _checkpoint_gib(records)
        if free is not None and need is not None and free < need:
            text = f"{host}: {free:.1f} GiB of disk are free, and the next checkpoint needs {need:.1f} GiB"
            yield Sign("disk_space", text, f"make room under {records.run.path}", "system.jsonl")
        shared = newest.get("shared_memory_free_gib")
        if shared is not None and shared * GIB < SHM_MINIMUM and newest.get("gpus"):
            text = f"{host}: {shared * 1024:.0f} MiB of /dev/shm are free"
            yield Sign("shared_memory", text, "docker run --ipc=host, or --shm-size=8g", "system.jsonl")


def _checkpoint_gib(records: Records) -> float | None:
    if records.plan is None or records.status.phase in run_status.ENDED:
        return None
    return records.plan.checkpoint_bytes / GIB


def _checkpoints(records: Records) -> Iterator[Sign]:
    status, plan = records.status, records.plan
    if plan is None or status.phase in run_status.ENDED or plan.save_every_n_steps <= 0:
        return
    saved = int(status.checkpoint.rpartition("-")[2]) if status.checkpoint else 0
    due = (status.step - saved) // plan.save_every_n_steps
    if due >= 2:
        last = f"the newest complete checkpoint is of step {saved}" if saved else "there is no complete checkpoint"
        text = f"{last}, in step {status.step} of a run that saves every {plan.save_every_n_steps} steps"
        advice = f"see whether the disk is full or slow, and whether checkpoint writers died: {records.logs}"
        yield Sign("no_checkpoint", text, advice, "checkpoints", fatal=due >= 3)


def _silence(records: Records, now: float) -> Iterator[Sign]:
    status = records.status
    if status.phase in run_status.ENDED or status.phase == run_status.STARTING:
        return
    silent = status.state(now) == run_status.SILENT
    beats = {beat.rank: beat for beat in status.ranks}
    if silent and all(now - beat.time > run_status.SILENT_AFTER_S for beat in beats.values()):
        ago = f"{(now - status.updated) / 60:.0f} min"
        text = f"no rank has given a sign of life for {ago}: killed from outside, or the machine is off"
        yield Sign("silent_run", text, "python launch.py diagnose NAME says more", "status.json", fatal=True)
        return
    for beat in beats.values():
        ended = any(state.rank == beat.rank and state.state != "running" for state in records.ranks)
        if not ended and now - beat.time > run_status.SILENT_AFTER_S:
            text = f"rank {beat.rank} on {beat.host} has given no sign of life for {now - beat.time:.0f} s"
            yield Sign("silent_rank", text, "look at that host; the others will wait for it", "logs", fatal=True)
    yield from _hang(records, now)


def _hang(records: Records, now: float) -> Iterator[Sign]:
    status, usual = records.status, records.step_seconds_median
    if usual is None or status.phase != run_status.TRAINING or not status.ranks:
        return
    last = max(beat.step_time for beat in status.ranks)
    limit = max(HANG_LEAST_S, HANG_FACTOR * usual)
    if last and now - last > limit:
        slowest = min(status.ranks, key=lambda beat: (beat.step, beat.time))
        text = f"no step has ended for {now - last:.0f} s (usually {usual:.2f} s); furthest behind is rank"
        text += f" {slowest.rank} on {slowest.host} in step {slowest.step}"
        advice = "Ctrl-C saves and stops if the ranks still answer; then look at that rank's log and host"
        yield Sign("no_step", text, advice, "status.json", fatal=True)


def _rate(records: Records) -> Iterator[Sign]:
    usual, now = records.tokens_per_second_median, records.status.tokens_per_second
    active = records.status.phase not in run_status.ENDED
    if active and usual and now and now < SLOW_RATE * usual and len(records.training) > RECENT:
        text = f"{now:,.0f} tokens/s, {now / usual:.0%} of this run's median of {usual:,.0f}"
        yield Sign("slow", text, "look at the GPUs' clocks and at what else runs on these machines", "metrics.jsonl")
