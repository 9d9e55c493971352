"""Commands and files to where a scheduler is: this machine, or one behind ssh."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError
from launcher.cluster_file import Cluster, Ssh
from launcher.executors.on_cluster import workdir_of

if TYPE_CHECKING:
    from nemo_run.core.tunnel.client import Tunnel


def open_tunnel(cluster: Cluster) -> Tunnel:
    """NeMo-Run's tunnel to where sbatch is.

    Raises:
        UserError: ssh does not get in, or there is no Slurm.
    """
    from nemo_run.core.tunnel.client import LocalTunnel, SSHTunnel

    chosen = cluster.tunnel
    where = "this machine"
    if isinstance(chosen, Ssh):
        where = f"{chosen.user}@{chosen.host}"
        host = chosen.host if chosen.port == 22 else f"{chosen.host}:{chosen.port}"
        key = str(Path(chosen.identity).expanduser()) if chosen.identity else None
        tunnel: Any = SSHTunnel(job_dir=workdir_of(cluster), host=host, user=chosen.user, identity=key)
        try:
            tunnel.connect()
        except (SystemExit, OSError) as problem:  # NeMo-Run ends the program when it is not let in
            raise UserError(
                f"ssh does not get into {where}",
                expected="a login by key",
                found=str(problem) or "not let in",
                do=f"ssh -p {chosen.port} {where} must work first; identity in the cluster file names the key",
            ) from None
    else:
        tunnel = LocalTunnel(job_dir="")
    if not run(tunnel, ["which", "sbatch"]).ok:
        raise UserError(
            f"there is no Slurm on {where}", expected="sbatch on PATH", found="none", do="log in to a node that has it"
        )
    return tunnel


def run(tunnel: Tunnel, words: list[str]) -> Any:
    """One command there, every word quoted; its result has ok, stdout, stderr."""
    return tunnel.run(shlex.join(words), hide=True, warn=True, in_stream=False)
