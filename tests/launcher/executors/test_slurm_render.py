"""The batch script: recorded; and the faults of nemo_run 0.4.0 for which its own renderer is not used."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from common.errors import UserError
from launcher.cluster_file import Cluster
from launcher.executors import slurm
from launcher.executors.on_cluster import check_size
from launcher.executors.slurm_render import render
from launcher.load_cluster import load_cluster
from tests.launcher.executors.jobs import job

ROOT = Path(__file__).resolve().parents[3]
GOLDENS = ROOT / "tests" / "goldens" / "cluster"


@pytest.mark.parametrize(("name", "retries"), [("slurm", 0), ("slurm-container", 0), ("slurm", 3)])
def test_script_is_the_recorded_one(name: str, retries: int) -> None:
    cluster = load_cluster(ROOT / "docs" / "clusters" / f"{name}.yaml")
    if cluster.workdir is None:
        cluster = cluster.model_copy(
            update={"workdir": "/home/me/qwen25", "python": "/home/me/qwen25/.venv/bin/python"}
        )
    script = render(job(cluster, num_nodes=2, devices=8, retries=retries), cluster, "runs/my-run/slurm")
    golden = GOLDENS / f"{name}{'-retries' if retries else ''}.sbatch"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(script)
    assert script == golden.read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


_SRUN = """#!/bin/bash
case "$*" in *watch.retry_helps*) exit $ANSWER ;; *) exit $CODE ;; esac
"""
_SCONTROL = """#!/bin/bash
[ "$1" = requeue ] && touch requeued; true
"""


@pytest.mark.parametrize(
    ("code", "answer", "restarts", "requeued"),
    [
        (1, 0, 0, True),
        (1, 0, 3, False),  # none is left
        (1, 4, 0, False),  # a retry cannot help
        (1, 127, 0, True),  # nobody could tell
        (0, 0, 0, False),
    ],
)
def test_a_failed_job_is_requeued_where_that_can_help(
    code: int, answer: int, restarts: int, requeued: bool, tmp_path: Path
) -> None:
    """The script itself, with Slurm's commands replaced."""
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    cluster = load_cluster(ROOT / "docs" / "clusters" / "slurm.yaml")
    script = render(job(cluster, num_nodes=2, devices=8, retries=3), cluster, "runs/my-run/slurm")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    env |= {"CODE": str(code), "ANSWER": str(answer), "SLURM_JOB_NODELIST": "a"}
    done = subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "requeued").exists() == requeued, done.stderr


def test_retries_without_a_queue_to_return_to_are_refused() -> None:
    never = Cluster.model_validate({"partition": "p", "slurm": {"requeue": False}})
    with pytest.raises(UserError, match="lets no job return to the queue"):
        slurm.check(job(never, retries=1))
    slurm.check(job(never))
    slurm.check(job(Cluster(), retries=1))


@pytest.mark.nemo
def test_stock_nemo_run_asks_for_pyxis_and_quotes_nothing() -> None:
    """If this fails, NeMo-Run has mended itself: look whether its renderer can replace slurm.sbatch.j2."""
    from nemo_run.core.execution.slurm import SlurmBatchRequest, SlurmExecutor, SlurmJobDetails
    from nemo_run.core.packaging.base import Packager
    from nemo_run.core.tunnel.client import LocalTunnel

    executor = SlurmExecutor(
        account="account",
        env_vars={"no_proxy": "a b; c"},
        srun_args=["--x=a b; c"],
        job_details=SlurmJobDetails(job_name="j", folder="f"),
        tunnel=LocalTunnel(job_dir="d"),
        packager=Packager(),
        job_dir="d",
    )
    stock = SlurmBatchRequest(
        cmd=["sbatch"], jobs=["j"], command_groups=[["true"]], slurm_config=executor, max_retries=0, extra_env={}
    ).materialize()
    assert "--container-mounts" in stock and "--container-workdir" in stock
    assert "export NO_PROXY=a b; c" in stock
    assert "--x=a b; c" in stock


def test_too_large_a_run_is_refused() -> None:
    cluster = load_cluster(ROOT / "docs" / "clusters" / "slurm.yaml")
    check_size(cluster, 2, 8, "slurm")
    with pytest.raises(UserError, match="more nodes than"):
        check_size(cluster, 3, 1, "slurm")
    check_size(cluster, 3, 1, "mpirun")  # whose list of hosts is counted
    for executor in ("slurm", "docker", "mpirun", "local", "k8s"):
        with pytest.raises(UserError, match="more devices_per_node than"):
            check_size(cluster, 1, 9, executor)
