"""Follow a Slurm job: rank 0's lines as they come, how the job ends, and the error of the rank that failed first."""

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
from launcher.executors.on_cluster import workdir_on_nodes
from launcher.executors.tunnel import run_command

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel

log = logging.getLogger("launch")
_ENDS = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
)  # fmt: skip
_POLL_S = (1.0, 10.0)  # from, to: a queue may hold a job for days, and all users share slurmctld


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has accepted.

    Args:
        logs: folder of Slurm's logs, as in slurm.logs_folder.
    """

    job_id: str
    job: Job
    cluster: Cluster
    logs: str

    @property
    def log_files(self) -> str:
        return f"{self.logs}/log-{self.job.folder.name}_{self.job_id}_*.out"

    def rank_logs(self, restarts: int) -> str:
        """Log folder of the ranks after so many requeues, as Slurm's machine sees it."""
        number = int(self.job.logs.name.rsplit("-", 1)[-1]) + restarts
        return self.path_there(str(self.job.folder.attempt(number)))

    def path_there(self, path: str) -> str:
        """The absolute path of a path that is relative to workdir."""
        return path if path.startswith("/") else f"{workdir_on_nodes(self.cluster)}/{path}"

    def command_from_here(self, words: list[str]) -> str:
        """What the user types on this machine to run `words` on Slurm's."""
        if isinstance(self.cluster.tunnel, Ssh):
            port = [] if self.cluster.tunnel.port == 22 else ["-p", str(self.cluster.tunnel.port)]
            words = ["ssh", *port, f"{self.cluster.tunnel.user}@{self.cluster.tunnel.host}", shlex.join(words)]
        return shlex.join(words)


@dataclass(frozen=True)
class _JobState:
    """The state that Slurm reports of the job."""

    state: str
    restarts: int = 0
    reason: str = ""


def follow(tunnel: Tunnel, submitted: Submitted) -> int:
    """Show rank 0's lines until the job ends.

    Returns:
        0 for a job that completed, the exit code of the rank that failed first (1 without one), 130 after Ctrl-C.
    """
    try:
        end = _wait_for_end(tunnel, submitted)
    except KeyboardInterrupt:
        log.warning("following stopped; job %s continues", submitted.job_id)
        log.warning("end it with: %s", submitted.command_from_here(["scancel", submitted.job_id]))
        return EXIT_INTERRUPTED
    if end.state == "COMPLETED":
        log.info("job %s completed", submitted.job_id)
        return 0
    return _report_failure(tunnel, submitted, end)


def _wait_for_end(tunnel: Tunnel, submitted: Submitted) -> _JobState:
    shown: dict[str, int] = {}
    pause, last = _POLL_S[0], ("", -1)
    while True:
        now = _query_job(tunnel, submitted.job_id)
        if (now.state, now.restarts) != last:
            why = f" ({now.reason})" if now.state == "PENDING" and now.reason not in ("", "None") else ""
            again = f", requeued {now.restarts} time(s)" if now.restarts else ""
            log.info("job %s: %s%s%s", submitted.job_id, now.state, why, again)
            last, pause = (now.state, now.restarts), _POLL_S[0]
        for restarts in range(max(0, now.restarts - 1), now.restarts + 1):
            _show_new_lines(tunnel, f"{submitted.rank_logs(restarts)}/console.log", shown)
        if now.state in _ENDS:
            return now
        time.sleep(pause)
        pause = min(pause * 1.2, _POLL_S[1])


def _query_job(tunnel: Tunnel, job_id: str) -> _JobState:
    """Ask slurmctld, which remembers a job for some minutes after its end and needs no accounting database."""
    done = run_command(tunnel, ["scontrol", "--oneliner", "show", "job", job_id])
    row = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
    if not done.ok or "JobState" not in row:
        if "Invalid job id" in done.stderr:
            return _JobState("FAILED", 0, "Slurm has forgotten the job")
        return _JobState("UNKNOWN", 0, " ".join(done.stderr.split()))  # slurmctld restarts, or ssh fails: ask again
    return _JobState(row["JobState"], int(row.get("Restarts") or 0), row.get("Reason", ""))


def _show_new_lines(tunnel: Tunnel, path: str, shown: dict[str, int]) -> None:
    """Show the whole lines that `path` has grown by; `shown` holds the bytes shown of each file."""
    start = shown.get(path, 0)
    text = run_command(tunnel, ["tail", "-c", f"+{start + 1}", path])
    if text.ok and text.stdout:
        whole = text.stdout[: text.stdout.rfind("\n") + 1]
        shown[path] = start + len(whole.encode())
        sys.stderr.write(whole)
        sys.stderr.flush()


def _report_failure(tunnel: Tunnel, submitted: Submitted, end: _JobState) -> int:
    first = rank_states.first_failure(_read_rank_states(tunnel, submitted.rank_logs(end.restarts)))
    if first is not None:
        log.error("rank %d failed first, on %s:\n%s", first.rank, first.host, first.error.rstrip())
    else:
        name = f"log-{submitted.job.folder.name}_{submitted.job_id}_{end.restarts}.out"
        tail = run_command(tunnel, ["tail", "-n", "40", submitted.path_there(f"{submitted.logs}/{name}")])
        log.error("no rank has recorded an error; the end of Slurm's log %s:\n%s", name, tail.stdout or tail.stderr)
    log.error("job %s ended as %s; %s", submitted.job_id, end.state, _advice(end, submitted))
    return first.exit_code if first is not None else EXIT_RUN


def _advice(end: _JobState, submitted: Submitted) -> str:
    if end.state == "TIMEOUT":
        return f"its time was up before it could save: raise stop_before_end_s; {submitted.job.resume_command}"
    if end.state == "OUT_OF_MEMORY":
        return "the nodes' memory, not the GPU's, ran out: sbatch: {mem: ...} in the cluster file"
    return f"logs: {submitted.rank_logs(end.restarts)} and {submitted.log_files}"


def _read_rank_states(tunnel: Tunnel, logs: str) -> list[rank_states.RankState]:
    listed = run_command(tunnel, ["find", logs, "-name", "rank-*.json"]).stdout.split("\n")
    rows = [run_command(tunnel, ["cat", path]).stdout for path in listed if path]
    return [rank_states.RankState(**json.loads(row)) for row in rows if row]
