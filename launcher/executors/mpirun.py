"""`mpirun`: Open MPI starts the ranks, on this machine or on the hosts of a hostfile.

What it runs, `mpirun -np N ... python -m launcher.rank_main runs/NAME`, can be typed by hand after a dry run:
training/distributed/rank_env.py maps Open MPI's variables (OMPI_COMM_WORLD_RANK, ...) to torchrun's.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from common import processes, rank_states
from common.commands import python_path
from common.errors import PreflightError, UserError
from common.files import write_atomic
from common.machine_facts import find_free_port
from launcher.cluster_file import Mpirun
from launcher.executors import Job
from launcher.executors.follow import Follower
from launcher.executors.signals import CTRL_C, ForwardSignals
from launcher.rank_watch import RankWatch
from training.distributed import rank_env

log = logging.getLogger("launch")


def submit(job: Job) -> int:
    """Start the ranks and show rank 0's lines until they end.

    Returns:
        0, or the exit code of the rank that failed first; 130 after Ctrl-C.

    Raises:
        UserError: several nodes without a hostfile, or an unreadable one; an MPI other than Open MPI.
        PreflightError: this machine has no mpirun.
    """
    hosts, file = _find_hosts(job)
    if job.cluster and job.cluster.mpirun.hosts:
        job.folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(str(file)), "".join(f"{host} slots={job.devices}\n" for host in hosts))
    program = "mpirun" if job.dryrun else _find_open_mpi()
    lines = _prepare_environment(job, hosts)
    command, environ = _command(job, program, file), {**os.environ, **job.env}
    if job.dryrun:
        words = [f"{key}={environ[key]}" for key in _exported_names(job)]
        log.info("mpirun: would start\n%s", shlex.join(["env", *words, *command]))
        return 0
    for line in lines:
        log.info("mpirun: %s", line)
    job.logs.mkdir(parents=True, exist_ok=True)
    log.info("started:   %d ranks on %s: %s", job.world_size, ", ".join(hosts) or "this machine", shlex.join(command))
    log.info("logs:      %s/rank-0.log to rank-%d.log, mpirun.log", job.logs, job.world_size - 1)
    log.info("cancel:    Ctrl-C (or kill %d) saves and stops; the second Ctrl-C stops at once", os.getpid())
    log.info("resume:    %s", job.resume_command)
    own = job.logs / "mpirun.log"
    with own.open("a") as output, Follower(job.logs / "console.log"):
        ranks = subprocess.Popen(command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        # it forwards SIGUSR1 to the ranks of all hosts; on SIGINT it would kill them
        forward = ForwardSignals(lambda count: ranks.send_signal(CTRL_C if count < 3 else signal.SIGTERM))
        with forward, RankWatch(job.logs):
            ranks.wait()
            rank_states.wait_until_ended(job.logs)
    return rank_states.log_outcome(job.logs, job.world_size, own, asked=forward.asked)


def check(job: Job) -> None:
    """Check that the list of hosts holds the nodes of the run."""
    _find_hosts(job)


def _command(job: Job, program: str, hostfile: str | None) -> list[str]:
    own = job.cluster.mpirun if job.cluster else None
    words = [program, "-np", str(job.world_size), "--map-by", f"ppr:{job.devices}:node"]
    words += ["--bind-to", "none"]  # it binds a rank to one core, and the data workers and savers with it
    words += ["--hostfile", hostfile] if hostfile else []
    words += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    words += ["--oversubscribe"] if job.accelerator == "cpu" else []
    words += own.args if own else []
    for key in _exported_names(job):
        words += ["-x", key]  # values from mpirun's environment: nothing to quote
    python = job.cluster.python if job.cluster and job.cluster.python else sys.executable
    return [*words, python, *job.rank_command[1:]]


def _exported_names(job: Job) -> list[str]:
    """Names of the variables that mpirun exports to the ranks of all hosts."""
    names = {*job.env, "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH"}
    if not job.dryrun:  # the ranks of a command that is typed by hand wait for no launcher
        names.add(processes.LAUNCHER_PROCESS)
    return sorted(names)


def _prepare_environment(job: Job, hosts: list[str]) -> list[str]:
    """Set the ranks' rendezvous, threads and import path, which `mpirun -x` exports.

    Returns:
        a line for the log for each value, with its reason.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    rank_env.clear_rank_variables(os.environ)  # the ranks do not belong to a Slurm job or torchrun around this command
    os.environ["MASTER_ADDR"] = address or (hosts[0] if hosts else "127.0.0.1")
    os.environ["MASTER_PORT"] = port or str(find_free_port())
    os.environ["PYTHONPATH"] = python_path()
    processes.name_launcher()
    threads = max(1, (os.cpu_count() or 1) // job.devices)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    where = "yours" if port else "the first free port here" + (f"; not checked on {hosts[0]}" if hosts else "")
    return [
        f"MASTER_ADDR={os.environ['MASTER_ADDR']} ({'yours' if address else 'where rank 0 runs'})",
        f"MASTER_PORT={os.environ['MASTER_PORT']} ({where})",
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} ({os.cpu_count()} cores / {job.devices} ranks, or yours)",
    ]


def _find_hosts(job: Job) -> tuple[list[str], str | None]:
    """The hosts of the run in their order, and Open MPI's file of them; none for this machine.

    The file is the cluster file's own, or runs/NAME/hostfile, which `submit` writes from its `hosts`.

    Raises:
        UserError: several nodes and no hosts, or fewer hosts than nodes.
    """
    own = job.cluster.mpirun if job.cluster else Mpirun()
    if own.hosts:
        hosts, file = own.host_names[: job.num_nodes], str(job.folder.path / "hostfile")
        where = f"in `hosts`: {', '.join(own.hosts)}"
    else:
        file = own.hostfile or ""
        rows = Path(file).read_text().splitlines() if file and Path(file).is_file() else []
        hosts = [row.split("#")[0].split()[0] for row in rows if row.split("#")[0].strip()]
        where = f"in {file}" if file else "no hosts"
    if (file or job.num_nodes > 1) and len(hosts) < job.num_nodes:
        raise UserError(
            "the list of hosts does not hold the nodes of the run",
            expected=f"{job.num_nodes} host(s)",
            found=f"{len(hosts)} {where}" if file else where,
            do="--cluster FILE with `mpirun: {hosts: [NAME, NAME]}` or `mpirun: {hostfile: PATH}` (docs/clusters.md)",
        )
    return hosts, file or None


def _find_open_mpi() -> str:
    """The path of Open MPI's mpirun.

    Raises:
        UserError: an mpirun of another MPI.
        PreflightError: no mpirun.
    """
    program = shutil.which("mpirun")
    if program is None:
        raise PreflightError(
            "there is no mpirun", expected="Open MPI's mpirun on PATH", found="none", do="apt-get install openmpi-bin"
        )
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.splitlines()
    if not version or "Open MPI" not in version[0]:
        raise UserError(
            "this mpirun is not Open MPI's",
            expected="Open MPI",
            found=version[0] if version else "no version",
            do="write it with --dryrun --write, then: mpirun -np N python -m launcher.rank_main runs/NAME",
        )
    return program
