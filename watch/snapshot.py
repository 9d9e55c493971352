"""One moment of a run, for the page of the monitor and, as one JSON object, for other programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import run_lock, run_status
from common.domain_losses import NOT_TRAINED, change_error, name_change, read_domain_losses
from common.json_files import read_json_list
from common.metric_rows import Row
from common.rundir import RunDir
from watch.records import Records, read_records
from watch.signs import Sign, find_signs


@dataclass(frozen=True)
class Snapshot:
    """What the files of a run said at one time (Unix seconds).

    Args:
        is_launched: the run has failed, and its launcher has not ended: it decides whether it starts the run again.
    """

    records: Records
    signs: tuple[Sign, ...]
    time: float
    is_launched: bool = False

    @property
    def state(self) -> str:
        """The phase, or `silent`; `retrying` where the launcher of a failed run may start it again."""
        may_retry = self.is_launched and self.records.may_retry
        return run_status.RETRYING if may_retry else self.records.status.state(self.time)

    @property
    def is_over(self) -> bool:
        """Nothing will change any more."""
        return self.records.status.phase in run_status.ENDED and not self.is_launched

    @property
    def checkpoint_age_s(self) -> float | None:
        """Seconds since the newest complete checkpoint was written."""
        written = self.records.status.checkpoint_time
        return self.time - written if written else None

    def newest_samples(self) -> list[Row]:
        """The last sample of each node."""
        nodes = {row.get("node", 0): row for row in self.records.samples}
        return [nodes[node] for node in sorted(nodes)]

    def validation(self) -> dict[str, dict[str, Any]]:
        """The newest validation by domain: loss, tokens, change since the first one, its error, and the verdict."""
        if not self.records.validation:
            return {}
        first_row, last_row = self.records.validation[0], self.records.validation[-1]
        first, found = read_domain_losses(first_row), {}
        for name, domain in read_domain_losses(last_row).items():
            row: dict[str, Any] = {"loss": domain.loss, "tokens": domain.tokens, "documents": domain.documents}
            change, error = domain.change, domain.change_standard_error
            if change is None and name in first:  # a run of an earlier version, or one resumed from there
                change = domain.loss - first[name].loss
                error = change_error(first[name], domain, first_row["step"])[0]
            verdict = "" if change is None else name_change(change, error)
            if last_row["step"] in (first_row["step"], domain.change_since):
                verdict = NOT_TRAINED
            row |= {"standard_error": domain.standard_error, "change": change, "change_standard_error": error}
            found[name] = {**row, "verdict": verdict}
        return found

    def to_row(self) -> dict[str, Any]:
        """Plain values; a number that is not finite is null, and named in the warnings."""
        records, status = self.records, self.records.status
        row = {
            "time": self.time,
            "run": str(records.run.path),
            "state": self.state,
            "executor": status.executor,
            "attempt": status.attempt,
            "step": status.step,
            "max_steps": status.max_steps,
            "loss": status.loss,
            "validation_loss": records.validation[-1].get("val_loss") if records.validation else None,
            "validation": {
                name: {key: _finite(value) for key, value in row.items()} for name, row in self.validation().items()
            },
            "lr": status.lr,
            "grad_norm": records.training[-1].get("grad_norm") if records.training else None,
            "tokens_per_second": status.tokens_per_second,
            "tokens_per_second_median": records.tokens_per_second_median,
            "step_seconds": status.step_seconds,
            "step_seconds_median": records.step_seconds_median,
            "eta_seconds": status.eta_seconds,
            "checkpoint": status.checkpoint,
            "checkpoint_age_seconds": self.checkpoint_age_s,
            "ranks": [
                {"rank": b.rank, "host": b.host, "phase": b.phase, "step": b.step, "silent_seconds": self.time - b.time}
                for b in status.ranks
            ],
            "nodes": self.newest_samples(),
            "telemetry": vccl_telemetry(records.run),
            "warnings": [sign.text for sign in self.signs],
        }
        if status.ending is not None and status.phase in run_status.ENDED:
            row["ending"] = {name: getattr(status.ending, name) for name in ("exit_code", "cause", "summary", "advice")}
        return {name: _finite(value) for name, value in row.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def take_snapshot(run: RunDir, now: float | None = None) -> Snapshot:
    """Read the run's files.

    Args:
        now: Unix time; by default the present by the clock of the machine that writes the run's status.
    """
    now = run_status.read_clock(run.status) if now is None else now
    records = read_records(run)
    failed = records.status.phase == run_status.FAILED
    is_launched = failed and run_lock.is_held_elsewhere(run.path, run_lock.LAUNCHER)
    return Snapshot(records, tuple(find_signs(records, now)), now, is_launched)


def vccl_telemetry(run: RunDir) -> list[str]:
    """The last line of each file in the folder where VCCL of this run writes its flow telemetry, on this machine."""
    for row in read_json_list(run.env):
        if row.get("key") == "NCCL_TELEMETRY_LOG_PATH":
            paths = sorted(path for path in Path(row["value"]).glob("*") if path.is_file())
            return [line for path in paths if (line := _last_line(path))]
    return []


def _last_line(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace")[-4096:].strip().splitlines()
    except OSError:
        return ""
    return f"{path.name}: {lines[-1]}" if lines else ""
