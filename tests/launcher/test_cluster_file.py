"""Cluster files: the examples load, what is wrong is refused with its line and a way on."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from launcher.cluster_file import Cluster, Ssh
from launcher.load_cluster import load_cluster

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "clusters").glob("*.yaml"))


def _load(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    assert load_cluster(path).devices_per_node >= 1


def test_there_is_an_example_for_each_executor() -> None:
    assert {path.stem for path in EXAMPLES} == {"slurm", "slurm-container", "docker", "k8s", "mpirun"}


def test_values_arrive() -> None:
    cluster = load_cluster(ROOT / "docs" / "clusters" / "slurm-container.yaml")
    assert isinstance(cluster.tunnel, Ssh) and cluster.tunnel.host == "login.cluster.example"
    assert cluster.env_layers == ("prod",) and not cluster.wait
    assert load_cluster(ROOT / "docs" / "clusters" / "slurm.yaml").slurm.sbatch["cpus-per-task"] == "8"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("partitoin: gpu\n", "line 1", "did you mean 'partition'"),
        ("nodes: 1\nslurm:\n  srn: []\n", "line 3", "did you mean 'srun'"),
        ("nodes: 1\nmpirun:\n  hostfil: x\n", "line 3", "did you mean 'hostfile'"),
        ("nodes: 1\ntime: 1:30:00\n", "line 2", "write it in quotes"),
        ("account: 123\n", "line 1", "write it in quotes"),
        ("nodes: 0\n", "line 1", "greater than or equal to 1"),
        ("nodes: '2'\n", "line 1", "valid integer"),
        ("account: 'a;b'\n", "line 1", "cannot be used safely"),
        ("python: --uid=root\n", "line 1", "cannot be used safely"),
        ("account: a\nworkdir: relative\n", "line 2", "cannot be used safely"),
        ('workdir: "/a\\nb"\n', "line 1", "cannot be used safely"),
        ("env: {A-B: x}\n", "line 1", "cannot be used safely"),
        ("nodes: 1\nnodes: 2\n", "line 2", "there twice"),
        ("tier: production\n", "line 1", "'dev', 'staging' or 'prod'"),
        ("image: x\nmounts:\n- /a:/b\n- /a\n", "line 4", "cannot be used safely"),
        ("slurm:\n  sbatch: {wrap: reboot}\n", "line 1", "the launcher sets wrap itself"),
        ('slurm:\n  sbatch: {comment: "a\' b"}\n', "line 2", "sbatch.comment"),
        ("tunnel: {kind: ssh, host: h, user: u}\n", "the file", "give workdir"),
        ("tunnel: {kind: ssh, host: '-oProxyCommand=x', user: u}\nworkdir: /w\n", "line 1", "cannot be used safely"),
        ("mounts: ['/a:/b']\n", "the file", "give an image"),
        ("mpirun: {hosts: [a], hostfile: b}\n", "line 1", "leave one out"),
        ("mpirun: {hosts: ['a[1-2']}\n", "line 1", "cannot be used safely"),
        ("collectives: nccl2\n", "line 1", "'vccl-ft'"),
        ("- a\n", "is not a cluster", "list"),
        ("a: [\n", "is not YAML", "line 2"),
        ("", "is not a cluster", "NoneType"),
    ],
)
def test_refused(tmp_path: Path, text: str, line: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        _load(tmp_path, text)
    said = str(refused.value)
    assert line in said and words in said, said
    assert "do this" in said


def test_hosts_by_name_and_by_number(tmp_path: Path) -> None:
    cluster = _load(tmp_path, "mpirun: {hosts: [head, 'gpu[08-11].lan']}\ncollectives: vccl-ft\n")
    assert cluster.mpirun.host_names == ["head", "gpu08.lan", "gpu09.lan", "gpu10.lan", "gpu11.lan"]
    assert cluster.mpirun.has_hosts and not Cluster().mpirun.has_hosts
    assert cluster.env_layers == ("vccl-ft",)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_cluster(tmp_path / "none.yaml")
