"""Every executor hands the whole environment to the ranks: the set, the cluster file's, and the user's shell's."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.environment.merge import Setting
from common.errors import UserError
from common.rundir import RunDir
from common.spec import RunSpec
from launcher import executor_table, launch
from launcher.cluster_file import Cluster, K8s
from launcher.executors import mpirun
from launcher.executors.docker import docker_run_command
from launcher.executors.k8s_manifest import manifest
from launcher.executors.slurm_render import render
from launcher.load_cluster import load_cluster
from recipes.resolve import resolve
from tests.launcher.executors.jobs import job

FILE = """
devices_per_node: 2
image: image:1
tier: dev
env: {NCCL_IB_HCA: "mlx5_0:1", NCCL_DEBUG: WARN}
"""


def _settings(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Setting], Cluster]:
    """What the launcher applies for this executor, with a shell that sets four variables."""
    (tmp_path / "c.yaml").write_text(FILE)
    for key in [key for key in os.environ if key.startswith(("NCCL_", "HF_", "WANDB_", "UCX_", "TORCH"))]:
        monkeypatch.delenv(key)
    for key, value in {
        "NCCL_DEBUG": "INFO",
        "UCX_TLS": "tcp",
        "HF_HOME": "/mine",
        "WANDB_API_KEY": "secret",
        "CUDA_VISIBLE_DEVICES": "3",
    }.items():
        monkeypatch.setenv(key, value)
    cluster = load_cluster(tmp_path / "c.yaml")
    spec = RunSpec(recipe="qwen25_tiny", env="nccl-no-shm", executor=executor, cluster=str(tmp_path / "c.yaml"))
    elsewhere = not executor_table.trains_here(executor, cluster)
    before = dict(os.environ)
    try:
        return launch._set_environment(resolve(dataclasses.replace(spec, elsewhere=elsewhere)), cluster), cluster
    finally:
        applied = dict(os.environ)
        os.environ.clear()
        os.environ.update(before)
        monkeypatch.setattr(os, "environ", applied)


def _handed_over(executor: str, cluster: Cluster, env: dict[str, str], root: Path) -> dict[str, str]:
    """The environment in which the executor starts the ranks."""
    written: Any = job(cluster, root=root, env=env, accelerator="cpu")
    if executor == "docker":
        words = docker_run_command(job(cluster, env=env, accelerator="cpu"), cluster)
        return dict(word.split("=", 1) for key, word in zip(words, words[1:], strict=False) if key == "-e")
    if executor == "slurm":
        lines = render(job(cluster, env=env, accelerator="cpu"), cluster, "runs/my-run/slurm").splitlines()
        return dict(
            line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export ") and "=" in line
        )
    if executor == "k8s":
        pod = manifest(written, cluster, K8s(pvc="claim"))[-1]["spec"]["template"]["spec"]["containers"][0]
        return {row["name"]: row.get("value", "") for row in pod["env"]}
    if executor == "mpirun":
        return {
            key: {**os.environ, **written.env}[key] for key in mpirun._exported_names(written) if key in written.env
        }
    return dict(os.environ)  # direct is this process, local's ranks are its children


@pytest.mark.parametrize("executor", list(executor_table.EXECUTORS))
def test_it_reaches_the_ranks(executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, cluster = _settings(executor, tmp_path, monkeypatch)
    found = {s.key: (s.value, s.source) for s in settings}
    assert found["NCCL_IB_HCA"] == ("mlx5_0:1", "cluster file")
    assert found["NCCL_DEBUG"] == ("WARN", "cluster file")  # over the tier's and the shell's
    assert found["CPT_PROCESS_GROUP_TIMEOUT_S"] == ("120", "dev")
    assert found["UCX_TLS"] == ("tcp", "user")
    assert ("HF_HOME" in found) == executor_table.shares_files(executor, cluster)
    assert "WANDB_API_KEY" not in found
    assert ("CUDA_VISIBLE_DEVICES" in found) == executor_table.trains_here(executor, cluster)  # this machine's number
    ranks = _handed_over(executor, cluster, {s.key: s.value for s in settings}, tmp_path)
    assert ranks["NCCL_IB_HCA"].strip("'") == "mlx5_0:1" and ranks["NCCL_DEBUG"] == "WARN" and ranks["UCX_TLS"] == "tcp"


def test_env_json_holds_all_with_their_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = _settings("local", tmp_path, monkeypatch)
    run = RunDir("r", tmp_path)
    run.path.mkdir()
    run.write(RunSpec(recipe="qwen25_tiny"), "", settings, [])
    rows = {row["key"]: row for row in json.loads(run.env.read_text())}
    origins = {rows[key]["source"] for key in ("NCCL_IB_HCA", "UCX_TLS", "WANDB_MODE", "NCCL_SHM_DISABLE")}
    assert origins == {"cluster file", "user", "base", "nccl-no-shm"}
    assert "overrules 'INFO' of your shell" in rows["NCCL_DEBUG"]["reason"]


def test_values_of_the_file_are_checked_before_anything_is_started(tmp_path: Path) -> None:
    cluster = Cluster.model_validate({"env": {"CPT_PROCESS_GROUP_TIMEOUT_S": "soon"}})
    with pytest.raises(UserError, match="not a number of seconds"):
        launch._set_environment(resolve(RunSpec(recipe="qwen25_tiny", executor="slurm", elsewhere=True)), cluster)


def test_mpirun_hosts_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many hosts as nodes are written with a slot per device; the ranks then check their own machines."""
    cluster = Cluster.model_validate({"mpirun": {"hosts": ["gpu[08-10]"]}, "devices_per_node": 2})
    monkeypatch.setattr(os, "environ", dict(os.environ))
    written = job(cluster, root=tmp_path, num_nodes=2, dryrun=True)
    assert mpirun.submit(written) == 0
    file = tmp_path / "my-run" / "hostfile"
    assert file.read_text() == "gpu08 slots=2\ngpu09 slots=2\n"
    words = mpirun._command(written, "mpirun", mpirun._find_hosts(written)[1])
    assert words[words.index("--hostfile") + 1] == str(file)
    assert not executor_table.trains_here("mpirun", cluster) and executor_table.shares_files("mpirun", cluster)
    assert executor_table.trains_here("mpirun", Cluster()) and executor_table.trains_here("mpirun", None)
    with pytest.raises(UserError, match="does not hold the nodes"):
        mpirun._find_hosts(job(cluster, root=tmp_path, num_nodes=4))
    with pytest.raises(UserError, match="does not hold the nodes"):
        mpirun._find_hosts(job(None, root=tmp_path, num_nodes=2))
