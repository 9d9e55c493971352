"""Which rank this process is: read from whoever started it, told to every library in one way.

Lightning, NeMo and Megatron each look for torchrun's, Slurm's and MPI's variables in an order of their own, so that
two of them can disagree, and a single process inside a Slurm job or under mpirun takes itself for one of many. After
`settle` there are torchrun's variables and no others; after `alone` there are none.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from common.errors import UserError

_FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "LSB_", "JSM_", "TORCHELASTIC_", "PET_")
_OURS: tuple[str, ...] = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "GROUP_WORLD_SIZE",
)
_OURS += ("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
# rank, world size, rank on the node, ranks on the node, a name of this one launch; the first that fits is believed
_STARTERS = {
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
class Place:
    """One rank among `world_size`, `local_rank` of its node's `local_world_size`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    restarts: int = 0  # how often the job was started again by its scheduler, without the launcher
    started_by: str = "this process"


def find(environ: MutableMapping[str, str], devices: int) -> Place:
    """The place that the starter's variables give this process.

    Args:
        environ: as the starter left it.
        devices: ranks per node, where the starter does not say.

    Raises:
        UserError: no starter, or another number of ranks than the run was written for.
    """
    rows = dict(_STARTERS)
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun, possibly inside a Slurm job or under mpirun
        rows = {"torchrun": rows["the environment"]}
    for starter, (rank, size, local, per_node, _) in rows.items():
        if rank in environ and size in environ:
            number = int(environ[rank])
            return Place(
                rank=number,
                world_size=int(environ[size]),
                local_rank=int(environ.get(local, number % devices)),
                local_world_size=int(environ.get(per_node, str(devices)).split("(")[0]),
                restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT") or environ.get("SLURM_RESTART_COUNT") or 0),
                started_by=starter,
            )
    raise UserError(
        "nobody says which rank this process is",
        expected="torchrun's RANK and WORLD_SIZE, or mpirun's or srun's variables",
        found="none of them",
        do="torchrun --nproc-per-node N -m launcher.rank_main runs/NAME (or mpirun -np N python -m ...)",
    )


def settle(environ: MutableMapping[str, str], place: Place) -> None:
    """Leave torchrun's variables, with a meeting point, and no other starter's.

    Raises:
        UserError: ranks on several nodes and nobody says where rank 0 listens.
    """
    own = place.started_by == "torchrun"
    kept = {key: environ[key] for key in environ if own and key.startswith("TORCHELASTIC_")}
    address = environ.get("MASTER_ADDR") or _address(environ, place)
    port = environ.get("MASTER_PORT") or str(_agreed_port(environ))
    _drop(environ)
    environ.update(kept)
    environ.setdefault("TORCHELASTIC_RUN_ID", "none")  # so that Lightning takes the ranks from these variables
    environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=port,
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        GROUP_RANK=str(place.rank // max(1, place.local_world_size)),
    )


def alone(environ: MutableMapping[str, str]) -> list[str]:
    """Forget every starter: this process is the whole run.

    Returns:
        the prefixes of what was dropped (`SLURM_*`), for the log.
    """
    dropped = _drop(environ)
    if dropped:  # their meeting point is not ours: another process may listen there
        environ.pop("MASTER_ADDR", None)
        environ.pop("MASTER_PORT", None)
    return sorted({key.split("_")[0] + "_*" if "_" in key and key not in _OURS else key for key in dropped})


def free_port(tries: int = 10, first: int = 29500) -> int:
    """The first port from `first` on that nobody listens on here, of `tries`.

    Raises:
        UserError: all of them are taken.
    """
    for port in range(first, first + tries):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError(
        f"no free port between {first} and {first + tries - 1}",
        expected="a port where rank 0 can listen",
        found=f"{tries} taken ports (`ss -ltnp` shows by whom)",
        do="set MASTER_PORT to a free one",
    )


def _drop(environ: MutableMapping[str, str]) -> list[str]:
    # OMPI_MCA_... are settings, not a place: containers set some without which MPI_Init, which Lightning calls where
    # mpi4py is installed, ends the process
    dropped = [key for key in environ if (key.startswith(_FOREIGN) and "_MCA_" not in key) or key in _OURS]
    for key in dropped:
        del environ[key]
    return dropped


def _address(environ: MutableMapping[str, str], place: Place) -> str:
    if place.local_world_size >= place.world_size:
        return "127.0.0.1"
    if "SLURM_LAUNCH_NODE_IPADDR" in environ:  # where srun was called: the first node of a batch job
        return environ["SLURM_LAUNCH_NODE_IPADDR"]
    raise UserError(
        "ranks on several nodes, and no meeting point",
        expected="MASTER_ADDR, the name or address of rank 0's node, in every rank's environment",
        found="no MASTER_ADDR",
        do="mpirun -x MASTER_ADDR=HOST ..., or python launch.py --executor mpirun, which sets it",
    )


def _agreed_port(environ: MutableMapping[str, str]) -> int:
    """A port that all ranks of one launch compute alike: from the launch's own name, above the usual services."""
    names = [environ[row[-1]] for row in _STARTERS.values() if row[-1] in environ]
    name = names[0] if names else str(os.getppid())
    return 20000 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 12000
