"""Follow a Slurm job: rank 0's lines as they come, its end, and the first failed rank's own error."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common import rank_states
from common.errors import EXIT_INTERRUPTED, EXIT_RUN
from launcher.cluster_file import Cluster, Ssh
from launcher.executors import Job
from launcher.executors.on_cluster import workdir_of
from launcher.executors.tunnel import run

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

log = logging.getLogger("launch")
_ENDS = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
)  # fmt: skip
_POLL_S = (1.0, 10.0)  # from, to: a queue may hold a job for days, and slurmctld serves everyone


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has.

    Args:
        target: folder of Slurm's logs, as in slurm.target_of.
    """

    job_id: str
    job: Job
    cluster: Cluster
    target: str

    @property
    def logs(self) -> str:
        return f"{self.target}/log-{self.job.folder.name}_{self.job_id}_*.out"

    def attempt(self, restarts: int) -> str:
        """Log folder of the ranks after so many requeues, as Slurm's host sees it."""
        number = int(self.job.logs.name.rsplit("-", 1)[-1]) + restarts
        return self.there(str(self.job.folder.attempt(number)))

    def there(self, path: str) -> str:
        return path if path.startswith("/") else f"{workdir_of(self.cluster)}/{path}"

    def command(self, words: list[str]) -> str:
        """What the user types here to run `words` where Slurm is."""
        if isinstance(self.cluster.tunnel, Ssh):
            port = [] if self.cluster.tunnel.port == 22 else ["-p", str(self.cluster.tunnel.port)]
            words = ["ssh", *port, f"{self.cluster.tunnel.user}@{self.cluster.tunnel.host}", shlex.join(words)]
        return shlex.join(words)


@dataclass(frozen=True)
class _Seen:
    """What Slurm says of the job."""

    state: str
    restarts: int = 0
    reason: str = ""


def follow(tunnel: Tunnel, submitted: Submitted) -> int:
    """Show rank 0's lines until the job ends.

    Returns:
        0 for a job that completed, the first failed rank's exit code (1 without one), 130 after Ctrl-C.
    """
    try:
        seen = _until_end(tunnel, submitted)
    except KeyboardInterrupt:
        log.warning("following stopped; job %s goes on", submitted.job_id)
        log.warning("end it with: %s", submitted.command(["scancel", submitted.job_id]))
        return EXIT_INTERRUPTED
    if seen.state == "COMPLETED":
        log.info("job %s completed", submitted.job_id)
        return 0
    return _failed(tunnel, submitted, seen)


def _until_end(tunnel: Tunnel, submitted: Submitted) -> _Seen:
    shown: dict[str, int] = {}
    pause, last = _POLL_S[0], ("", -1)
    while True:
        seen = _look(tunnel, submitted.job_id)
        if (seen.state, seen.restarts) != last:
            why = f" ({seen.reason})" if seen.state == "PENDING" and seen.reason not in ("", "None") else ""
            again = f", requeued {seen.restarts} time(s)" if seen.restarts else ""
            log.info("job %s: %s%s%s", submitted.job_id, seen.state, why, again)
            last, pause = (seen.state, seen.restarts), _POLL_S[0]
        for restarts in range(max(0, seen.restarts - 1), seen.restarts + 1):
            _show_new(tunnel, f"{submitted.attempt(restarts)}/console.log", shown)
        if seen.state in _ENDS:
            return seen
        time.sleep(pause)
        pause = min(pause * 1.2, _POLL_S[1])


def _look(tunnel: Tunnel, job_id: str) -> _Seen:
    """Ask slurmctld, which keeps a job for some minutes after its end and needs no accounting database."""
    done = run(tunnel, ["scontrol", "--oneliner", "show", "job", job_id])
    row = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
    if not done.ok or "JobState" not in row:
        if "Invalid job id" in done.stderr:
            return _Seen("FAILED", 0, "Slurm has forgotten the job")
        return _Seen("UNKNOWN", 0, " ".join(done.stderr.split()))  # slurmctld restarts, or ssh hiccups: ask again
    return _Seen(row["JobState"], int(row.get("Restarts") or 0), row.get("Reason", ""))


def _show_new(tunnel: Tunnel, path: str, shown: dict[str, int]) -> None:
    """What `path` has grown by since the last look."""
    start = shown.get(path, 0)
    text = run(tunnel, ["tail", "-c", f"+{start + 1}", path])
    if text.ok and text.stdout:
        whole = text.stdout[: text.stdout.rfind("\n") + 1]
        shown[path] = start + len(whole.encode())
        sys.stderr.write(whole)
        sys.stderr.flush()


def _failed(tunnel: Tunnel, submitted: Submitted, seen: _Seen) -> int:
    found = _states(tunnel, submitted.attempt(seen.restarts))
    first = rank_states.first_failure(found)
    if first is not None:
        log.error("rank %d failed first, on %s:\n%s", first.rank, first.host, first.error.rstrip())
    else:
        pattern = f"log-{submitted.job.folder.name}_{submitted.job_id}_{seen.restarts}.out"
        tail = run(tunnel, ["tail", "-n", "40", submitted.there(f"{submitted.target}/{pattern}")])
        log.error("no rank has left an error; the end of Slurm's log %s:\n%s", pattern, tail.stdout or tail.stderr)
    log.error("job %s ended as %s; %s", submitted.job_id, seen.state, _advice(seen, submitted))
    return first.exit_code if first is not None else EXIT_RUN


def _advice(seen: _Seen, submitted: Submitted) -> str:
    if seen.state == "TIMEOUT":
        return f"its time was up before it could save: raise stop_before_end_s; {submitted.job.resume_command}"
    if seen.state == "OUT_OF_MEMORY":
        return "the nodes' memory, not the GPU's, ran out: sbatch: {mem: ...} in the cluster file"
    return f"logs: {submitted.attempt(seen.restarts)} and {submitted.logs}"


def _states(tunnel: Tunnel, logs: str) -> list[rank_states.RankState]:
    listed = run(tunnel, ["find", logs, "-name", "rank-*.json"]).stdout.split("\n")
    rows = [run(tunnel, ["cat", path]).stdout for path in listed if path]
    return [rank_states.RankState(**json.loads(row)) for row in rows if row]
