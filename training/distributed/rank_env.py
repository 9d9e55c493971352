"""Reads this process's rank from its launcher's variables, and sets torchrun's variables for every library.

Lightning, NeMo and Megatron each look for torchrun's, Slurm's and MPI's variables, each in its own order. Two of them
can disagree, and a single process inside a Slurm job or under mpirun can take itself for one of many.
`set_torchrun_variables` leaves torchrun's variables and no other launcher's; `clear_rank_variables` leaves none at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from common.errors import UserError

_OTHER_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "LSB_", "JSM_", "TORCHELASTIC_", "PET_")
_TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
)
# launcher -> its variables for: rank, world size, rank on the node, ranks on the node, a name of this launch.
# The first launcher whose rank and world size are set is used.
_LAUNCHERS = {
    "mpirun (Open MPI)": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    "mpirun (MPICH, Intel MPI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDRA_LAUNCHER_EXEC"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"),
    "the environment": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
}


@dataclass(frozen=True)
class RankInfo:
    """One rank of `world_size`, which is `local_rank` of the `local_world_size` ranks on its node.

    Args:
        restarts: how often a scheduler has started the job again by itself.
        started_by: the launcher whose variables were read.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0
    started_by: str = "this process"


def read_rank(environ: MutableMapping[str, str], devices: int) -> RankInfo:
    """Read this process's rank from its launcher's variables.

    Args:
        environ: the environment as the launcher left it.
        devices: ranks per node, for a launcher that does not say.

    Raises:
        UserError: no launcher's variables are set.
    """
    candidates = dict(_LAUNCHERS)
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, possibly inside a Slurm job or under mpirun
        candidates = {"torchrun": candidates["the environment"]}
    for launcher, (rank_key, size_key, local_rank_key, local_size_key, _) in candidates.items():
        if rank_key in environ and size_key in environ:
            rank = int(environ[rank_key])
            return RankInfo(
                rank=rank,
                world_size=int(environ[size_key]),
                local_rank=int(environ.get(local_rank_key, rank % devices)),
                local_world_size=int(environ.get(local_size_key, str(devices)).split("(")[0]),
                restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or 0),
                started_by=launcher,
            )
    raise UserError(
        "no variable says which rank this process is",
        expected="torchrun's RANK and WORLD_SIZE, or mpirun's or srun's variables",
        found="none of them",
        do="torchrun --nproc-per-node N -m launcher.rank_main runs/NAME (or mpirun -np N python -m ...)",
    )


def set_torchrun_variables(environ: MutableMapping[str, str], info: RankInfo) -> None:
    """Replace every launcher's variables by torchrun's, MASTER_ADDR and MASTER_PORT included.

    Raises:
        UserError: the ranks are on several nodes and nothing gives the address of rank 0.
    """
    from_torchrun = info.started_by == "torchrun"
    kept = {key: environ[key] for key in environ if from_torchrun and key.startswith("TORCHELASTIC_")}
    address = environ.get("MASTER_ADDR") or _master_address(environ, info)
    port = environ.get("MASTER_PORT") or str(_shared_port(environ))
    _remove_rank_variables(environ)
    environ.update(kept)
    environ.setdefault("TORCHELASTIC_RUN_ID", "none")  # so that Lightning takes the ranks from these variables
    environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=port,
        RANK=str(info.rank),
        WORLD_SIZE=str(info.world_size),
        LOCAL_RANK=str(info.local_rank),
        LOCAL_WORLD_SIZE=str(info.local_world_size),
        GROUP_RANK=str(info.rank // max(1, info.local_world_size)),
    )


def clear_rank_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove every launcher's variables: this process is the whole run, or starts ranks of its own.

    Returns:
        the prefixes of the removed variables (`SLURM_*`), for the log.
    """
    removed = _remove_rank_variables(environ)
    if removed:  # their master address is not this run's: another process may listen there
        environ.pop("MASTER_ADDR", None)
        environ.pop("MASTER_PORT", None)
    return sorted({key if key in _TORCHRUN else key.split("_")[0] + "_*" for key in removed})


def _remove_rank_variables(environ: MutableMapping[str, str]) -> list[str]:
    # OMPI_MCA_... are settings of the library. Containers set some of them without which MPI_Init ends the process.
    # Lightning calls it where mpi4py is installed, unless common.load_nemo was called before.
    removed = [key for key in environ if (key.startswith(_OTHER_LAUNCHERS) and "_MCA_" not in key) or key in _TORCHRUN]
    for key in removed:
        del environ[key]
    return removed


def _master_address(environ: MutableMapping[str, str], info: RankInfo) -> str:
    if info.local_world_size >= info.world_size:
        return "127.0.0.1"
    if "SLURM_LAUNCH_NODE_IPADDR" in environ:  # where srun was called: the first node of a batch job
        return environ["SLURM_LAUNCH_NODE_IPADDR"]
    raise UserError(
        "the ranks are on several nodes, and the address of rank 0 is not known",
        expected="MASTER_ADDR, the name or address of rank 0's node, in every rank's environment",
        found="no MASTER_ADDR",
        do="mpirun -x MASTER_ADDR=HOST ..., or python launch.py --executor mpirun, which sets it",
    )


def _shared_port(environ: MutableMapping[str, str]) -> int:
    """A port above the usual services that every rank computes alike, from the name of the launch."""
    names = [environ[keys[-1]] for keys in _LAUNCHERS.values() if keys[-1] in environ]
    name = names[0] if names else str(os.getppid())
    return 20000 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 12000
