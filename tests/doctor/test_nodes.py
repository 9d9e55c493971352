"""`doctor --cluster`: every node's row, the links between nodes, and a node that is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common import rank_states
from common.environment.merge import Setting
from common.errors import UserError
from common.machine_facts import find_free_port
from common.rundir import RunDir
from common.spec import RunSpec
from doctor.nodes import check_options, guess_executor
from launcher.cluster_file import Cluster
from tests.fork_server import python_path

ROOT = Path(__file__).resolve().parents[2]


def _ranks(folder: RunDir, world: int, **environ: str) -> list[int]:
    """Exit codes of ranks that are the first of a node each, all on this machine."""
    folder.path.mkdir(parents=True)
    folder.write(RunSpec(recipe="doctor"), "", [Setting("GLOO_SOCKET_IFNAME", "lo", "cluster file", "c.yaml")], [])
    common = {
        **os.environ,
        **environ,
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "PYTHONPATH": python_path(ROOT)}
    command = [sys.executable, "-m", "doctor.node_rank", str(folder.path)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(world)]
    return [rank.wait(timeout=100) for rank in ranks]


@pytest.mark.nemo
def test_three_nodes_and_their_links(tmp_path: Path) -> None:
    folder = RunDir("nodes-c", tmp_path)
    assert _ranks(folder, 3) == [0, 0, 0]
    found = json.loads((folder.path / "nodes.json").read_text())
    assert len(found["nodes"]) == len(found["links"]) == 3 and found["mode"] == "gloo"
    assert all(link["gb_per_s"] > 0 for link in found["links"])
    said = (folder.attempt(1) / "console.log").read_text()
    slowest = min(link["gb_per_s"] for link in found["links"])
    assert f"{slowest:.2f} GB/s" in said and "slowest link: " in said and "mode: gloo" in said
    assert {state.state for state in rank_states.read(folder.attempt(1))} == {rank_states.DONE}


@pytest.mark.nemo
def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = RunDir("nodes-c", tmp_path)
    assert _ranks(folder, 1, CPT_PROCESS_GROUP_BACKEND="nosuch") == [1]
    (state,) = rank_states.read(folder.attempt(1))
    assert state.state == rank_states.FAILED and "nosuch" in state.error


@pytest.mark.parametrize(
    ("file", "executor"),
    [
        ({"k8s": {"pvc": "p"}, "image": "i"}, "k8s"),
        ({"mpirun": {"hosts": ["a"]}}, "mpirun"),
        ({"image": "i"}, "docker"),
        ({"image": "i", "partition": "gpu"}, "slurm"),
        ({"partition": "gpu"}, "slurm"),
    ],
)
def test_the_executor_that_a_file_describes(file: dict[str, object], executor: str) -> None:
    assert guess_executor(Cluster.model_validate(file)) == executor


def test_no_option_is_ignored() -> None:
    check_options(None, with_cluster={"--nodes": None}, without={"--json": True})
    check_options(Path("c.yaml"), with_cluster={"--nodes": 2}, without={"--json": False})
    with pytest.raises(UserError, match="--nodes needs --cluster FILE"):
        check_options(None, with_cluster={"--nodes": 2}, without={"--json": True})
    with pytest.raises(UserError, match="--json is for this machine only"):
        check_options(Path("c.yaml"), with_cluster={"--nodes": 2}, without={"--json": True})


def test_more_nodes_than_the_file_allows(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("partition: gpu\nnodes: 2\n")
    command = [sys.executable, str(ROOT / "launch.py"), "doctor", "--cluster", "c.yaml", "--nodes", "3"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "more nodes than the cluster file allows" in done.stderr
    assert not (tmp_path / "doctor-runs").exists()
