"""A real Slurm on loopback: munged, slurmctld and two slurmd of one host, as root, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# without it each requeue waits two minutes for the old credential to expire
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=9 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """The daemons' folder and the environment in which their commands find them."""

    folder: Path
    env: dict[str, str]

    def __call__(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()


def _ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"NO SLURM HERE: {'needs root' if not missing else ', '.join(missing) + ' not installed'}")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    ctld, *ports = _ports(3)
    nodes = "\n".join(
        f"NodeName=node{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
        for i, port in enumerate(ports, start=1)
    )
    (folder / "slurm.conf").write_text(_CONF.format(host=socket.gethostname(), folder=folder, ctld=ctld, nodes=nodes))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    own = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    ]
    commands[0] += own
    commands += [["slurmctld", "-D"], ["slurmd", "-D", "-N", "node1"], ["slurmd", "-D", "-N", "node2"]]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}-{len(daemons)}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
            _wait_for(folder / "munge.socket")
        _wait_until_idle(env, folder)
        yield Slurm(folder, env)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(timeout=15)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 15
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _wait_until_idle(env: dict[str, str], folder: Path) -> None:
    deadline, seen = time.monotonic() + 60, None
    while time.monotonic() < deadline:
        seen = subprocess.run(["sinfo", "-h", "-p", "low", "-o", "%D %t"], env=env, capture_output=True, text=True)
        if seen.stdout.strip() == "2 idle":
            return
        time.sleep(0.3)
    logs = "\n".join(
        f"== {path.name}\n{path.read_text()[-1500:]}" for path in [*folder.glob("*.log"), *folder.glob("*.out")]
    )
    raise AssertionError(f"Slurm did not come up: {seen}\n{logs}")
