"""Every launcher's variables give the same rank, and none is left for a library to misread."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import UserError
from training.distributed.rank_env import clear_rank_variables, read_rank, set_torchrun_variables

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "123",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29501",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        (OPEN_MPI, "node1"),
        (SRUN, "10.0.0.1"),
        (TORCHRUN, "node1"),
        (HYDRA, "node1"),
        ({**SRUN, **OPEN_MPI, "SLURM_PROCID": "0"}, "node1"),  # mpirun inside a Slurm job
        ({**SRUN, **TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "node1"),  # torchrun inside one
    ],
)
def test_every_launcher_gives_the_same_rank(environ: dict[str, str], address: str) -> None:
    environ = dict(environ)
    found = read_rank(environ, devices=2)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    set_torchrun_variables(environ, found)
    assert (environ["RANK"], environ["WORLD_SIZE"], environ["LOCAL_RANK"]) == ("3", "4", "1")
    assert environ["MASTER_ADDR"] == address and 1024 < int(environ["MASTER_PORT"]) < 65536
    assert not [key for key in environ if key.startswith(("SLURM_", "OMPI_", "PMI"))]
    assert ("TORCHELASTIC_USE_AGENT_STORE" in environ) == (found.started_by == "torchrun")


def test_all_ranks_of_a_launch_agree_on_a_port() -> None:
    ports = set()
    for rank in range(4):
        environ = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}
        del environ["MASTER_PORT"]
        set_torchrun_variables(environ, read_rank(environ, devices=2))
        ports.add(environ["MASTER_PORT"])
    assert len(ports) == 1


def test_several_nodes_need_the_address_of_rank_0() -> None:
    environ = {key: value for key, value in OPEN_MPI.items() if key != "MASTER_ADDR"}
    with pytest.raises(UserError, match="address of rank 0 is not known"):
        set_torchrun_variables(environ, read_rank(environ, devices=2))
    with pytest.raises(UserError, match="which rank"):
        read_rank({}, devices=2)


def test_the_local_rank_follows_from_the_ranks_per_node() -> None:
    """Where the launcher gives rank and world size only."""
    found = [read_rank({"RANK": str(rank), "WORLD_SIZE": "6"}, devices=3) for rank in range(6)]
    assert [info.local_rank for info in found] == [0, 1, 2, 0, 1, 2]
    assert {info.local_world_size for info in found} == {3}


def test_restarts_of_a_job_are_counted() -> None:
    assert read_rank({**SRUN, "SLURM_RESTART_COUNT": "2"}, devices=2).restarts == 2


def test_clear_removes_every_launchers_variables() -> None:
    environ = {**SRUN, **OPEN_MPI, **TORCHRUN, "PATH": "/bin"}
    assert clear_rank_variables(environ)
    assert environ == {"PATH": "/bin"}
    own = {"MASTER_ADDR": "127.0.0.1"}  # docs/trouble.md: what helps where the host's name does not resolve
    assert clear_rank_variables(own) == [] and own == {"MASTER_ADDR": "127.0.0.1"}


def test_settings_of_an_mpi_library_stay() -> None:
    """A container's OMPI_MCA_plm_rsh_agent lets MPI_Init work without ssh; a library may call it."""
    environ = {"OMPI_MCA_plm_rsh_agent": "/bin/false", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    clear_rank_variables(environ)
    assert environ == {"OMPI_MCA_plm_rsh_agent": "/bin/false"}


def _environment_with_mpi4py() -> str:
    """The environment in which Lightning looks for its ranks where mpi4py is installed and says that there are two."""
    from lightning.fabric.plugins.environments import mpi
    from lightning.pytorch import Trainer

    mpi._MPI4PY_AVAILABLE = True
    mpi4py: Any = types.ModuleType("mpi4py")
    mpi4py.MPI = types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(Get_size=lambda: 2))
    sys.modules["mpi4py"] = mpi4py
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    return type(trainer._accelerator_connector.cluster_environment).__name__


@pytest.mark.nemo
def test_mpi_is_not_asked_for_ranks(forked: Callable[..., Any]) -> None:
    assert forked(_environment_with_mpi4py) == "LightningEnvironment"
