"""Run commands and copy files where the scheduler is: on this machine, or on one behind ssh."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import processes
from common.errors import UserError
from launcher.cluster_file import Cluster, Ssh
from launcher.executors.on_cluster import workdir_on_nodes

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel


def open_tunnel(cluster: Cluster) -> Tunnel:
    """Open NeMo-Run's tunnel to the machine that has sbatch.

    Raises:
        UserError: ssh does not let us in, or there is no Slurm.
    """
    from nemo_run.core.tunnel.client import LocalTunnel

    where, tunnel = "this machine", LocalTunnel(job_dir="")
    if isinstance(cluster.tunnel, Ssh):
        where = f"{cluster.tunnel.user}@{cluster.tunnel.host}"
        tunnel = _open_ssh(cluster.tunnel, workdir_on_nodes(cluster), where)
    if not run_command(tunnel, ["which", "sbatch"]).ok:
        raise UserError(
            f"there is no Slurm on {where}", expected="sbatch on PATH", found="none", do="log in to a node that has it"
        )
    return tunnel


def _open_ssh(ssh: Ssh, workdir: str, where: str) -> Tunnel:
    from nemo_run.core.tunnel.client import SSHTunnel

    host = ssh.host if ssh.port == 22 else f"{ssh.host}:{ssh.port}"
    key = str(Path(ssh.identity).expanduser()) if ssh.identity else None
    tunnel = SSHTunnel(job_dir=workdir, host=host, user=ssh.user, identity=key)
    try:
        tunnel.connect()
    except (SystemExit, OSError) as problem:  # NeMo-Run ends the program when the login fails
        raise UserError(
            f"ssh cannot log in as {where}",
            expected="a login by key",
            found=str(problem) or "the login was refused",
            do=f"ssh -p {ssh.port} {where} must work first; identity in the cluster file names the key",
        ) from None
    return tunnel


def run_command(tunnel: Tunnel, words: list[str]) -> Any:
    """Run one command there, every word quoted; the result has ok, stdout and stderr.

    A Ctrl-C takes effect when the command has ended: invoke, which runs it, would pass it on to the command only.
    """
    with processes.defer_stop_signals():
        return tunnel.run(shlex.join(words), hide=True, warn=True, in_stream=False)
