"""Start a failed run again from its newest checkpoint, as long as that can help."""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import dataclass, field

from common import rank_states
from common.errors import EXIT_INTERRUPTED, EXIT_PREFLIGHT, EXIT_USER
from common.json_files import read_json_lines
from common.run_status import Ending, RunStatus, read_status
from common.rundir import RunDir
from common.spec import RunSpec
from launcher.executor_table import EXECUTORS

OUT_OF_MEMORY = "cuda_oom"  # a name of watch/known_failures.py
_MICRO_BATCH = "data.micro_batch_size"
_LAST_BYTES = 1 << 16  # of metrics.jsonl: its newest lines
log = logging.getLogger("launch")


def find_last_step(folder: RunDir, status: RunStatus) -> int:
    """The last step that the newest attempt is known to have ended.

    A killed rank leaves a heartbeat that is some seconds old, in which many steps may have ended: the lines of
    metrics.jsonl and the checkpoints know of more.
    """
    beats = [state.step for state in rank_states.read(folder.attempt(status.attempt))]
    rows = read_json_lines(folder.metrics, last_bytes=_LAST_BYTES)
    own = [row for row in rows if "loss" in row and isinstance(row.get("step"), int)]
    steps = [int(row["step"]) for row in own if row.get("time", 0.0) >= status.started]
    return max(status.step, folder.newest_step(), *beats, *steps)


@dataclass
class Retries:
    """Decides after each attempt whether there is another one.

    The run's recorded spec says how many there may be, and how long to wait before each.
    """

    _started: int = 0
    _furthest: int = -1  # step that any attempt has reached
    _causes: set[str] = field(default_factory=set)  # of the failures since the run got there

    def next_spec(self, folder: RunDir, code: int) -> RunSpec | None:
        """What to start next; None ends the run with its exit code.

        Waits as long as the recorded spec says. The spec resumes from the newest checkpoint; without one the run starts
        from the beginning, in the same run directory.
        """
        if code in (0, EXIT_USER, EXIT_PREFLIGHT, EXIT_INTERRUPTED) or not folder.spec_file.is_file():
            return None
        spec = folder.spec()
        if not spec.retries or EXECUTORS[spec.executor or "direct"].on_cluster:
            return None  # on a cluster, Slurm's requeue and the backoff limit of a Kubernetes Job do it
        status = read_status(folder.status) or RunStatus()
        ending = status.ending or Ending()
        step = find_last_step(folder, status)
        if self._started >= spec.retries:
            log.error("retry: none is left of %d", spec.retries)
            return None
        changed: tuple[str, ...] = ()
        if ending.cause == OUT_OF_MEMORY:
            changed = self._smaller_batch(spec)
            if not changed:
                return None
        elif reason := self._reason_to_stop(ending, step):
            log.error("retry: not tried: %s", reason)
            return None
        self._remember(ending, step)
        self._started += 1
        checkpoints = folder.complete_checkpoints()
        where = f"from {checkpoints[-1].name}" if checkpoints else "from the beginning: there is no checkpoint"
        log.warning(
            "retry %d of %d in %g s: %s (failed at step %d: %s)",
            *(self._started, spec.retries, spec.retry_wait, where, step, ending.summary or f"exit code {code}"),
        )
        time.sleep(spec.retry_wait)
        if checkpoints:  # what the run has recorded stands: each of its words counts once
            return dataclasses.replace(spec, name=folder.name, resume=True, overrides=changed)
        paths = [word.partition("=")[0] for word in changed]
        kept = tuple(word for word in spec.overrides if word.partition("=")[0] not in paths)
        return dataclasses.replace(spec, name=folder.name, resume=False, overrides=(*kept, *changed))

    def _reason_to_stop(self, ending: Ending, step: int) -> str:
        """Why another attempt would not help, or an empty text."""
        if ending.can_retry is False:
            return f"{ending.summary}: the same would happen again"
        if step <= self._furthest and (ending.cause or ending.summary) in self._causes:
            no_further = f"no further than step {self._furthest}"
            return f"it failed again at step {step}, for the same reason and {no_further}: {ending.summary}"
        return ""

    def _remember(self, ending: Ending, step: int) -> None:
        if step > self._furthest:
            self._furthest, self._causes = step, set()
        self._causes.add(ending.cause or ending.summary)

    def _smaller_batch(self, spec: RunSpec) -> tuple[str, ...]:
        """At most half the micro batch, so that the training stays the same; empty if there is no smaller one."""
        from recipes import memory
        from recipes.resolve import resolve

        plan = resolve(spec).plan
        before, after = plan.micro_batch_size, memory.half_micro_batch(plan)
        if after is None:
            log.error("retry: not tried: out of memory with a micro batch of %d, and no smaller one", before)
            return ()
        log.warning("retry: out of memory: micro batch %d -> %d, the global batch stays", before, after)
        return (f"{_MICRO_BATCH}={after}",)
