"""The table of executors: every name has its module, and knows whose files the launcher can look at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from launcher import executor_table
from launcher.cluster_file import Cluster
from launcher.executors.on_cluster import check_run_folder
from launcher.load_cluster import load_cluster

ROOT = Path(__file__).resolve().parents[3]
CLUSTERS = ROOT / "docs" / "clusters"


def test_every_executor_has_a_module_and_the_others_stay_unimported() -> None:
    """Looking up one executor imports neither NeMo nor torch nor another executor."""
    code = """
import sys
from launcher import executor_table, executors
for name in executor_table.EXECUTORS:
    if name != "direct":  # trains in this process: its module is that of the ranks
        assert callable(executors.resolve(name))
heavy = {"torch", "nemo", "nemo_run", "docker", "kubernetes", "lightning"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_what_is_missing_is_refused_before_anything_is_built() -> None:
    with pytest.raises(UserError, match="did you mean --executor slurm"):
        executor_table.check("slrum", None)
    for name in ("slurm", "k8s"):
        with pytest.raises(UserError, match="--cluster FILE") as refused:
            executor_table.check(name, None)
        assert f"docs/clusters/{name}.yaml" in str(refused.value) and (CLUSTERS / f"{name}.yaml").is_file()
    executor_table.check("docker", None)


def test_whose_files_the_launcher_sees() -> None:
    """Containers, a machine behind ssh and Kubernetes have their own; a Slurm cluster's nodes share this one's."""
    here = {name for name in executor_table.EXECUTORS if executor_table.shares_files(name, Cluster())}
    assert here == {"direct", "local", "mpirun", "slurm"}
    assert not executor_table.shares_files("slurm", load_cluster(CLUSTERS / "slurm-container.yaml"))
    assert not executor_table.shares_files("slurm", Cluster(image="nvcr.io/nvidia/nemo:25.04"))
    ssh = Cluster.model_validate({"workdir": "/w", "tunnel": {"kind": "ssh", "host": "h", "user": "u"}})
    assert not executor_table.shares_files("slurm", ssh)
    assert executor_table.shares_files("mpirun", ssh) and executor_table.shares_files(None, None)


def test_whose_run_directory_the_launcher_sees() -> None:
    """A container mounts the checkout; behind ssh and in Kubernetes logs and checkpoints are out of sight."""
    ssh = Cluster.model_validate({"workdir": "/w", "tunnel": {"kind": "ssh", "host": "h", "user": "u"}})
    sees = executor_table.shares_run_folder
    assert all(sees(name, Cluster()) for name in executor_table.EXECUTORS if name != "k8s")
    assert sees("docker", None) and sees("slurm", Cluster(image="i")) and sees("mpirun", ssh) and sees("local", None)
    assert not sees("slurm", ssh) and not sees("k8s", Cluster())


@pytest.mark.parametrize("runs", ["/elsewhere", "../beside", "my runs", "runs%j", "runs:x"])
def test_a_run_directory_that_the_ranks_cannot_use(runs: str) -> None:
    """In a container or behind ssh it must be in the checkout; no scheduler takes names that need quotes."""
    with pytest.raises(UserError, match="cannot use the run directory"):
        check_run_folder(Path(runs) / "name", in_checkout=True)
    if runs.startswith(("/", ".")):
        check_run_folder(Path(runs) / "name", in_checkout=False)
    check_run_folder(Path("runs/name"), in_checkout=True)
