"""`--executor slurm` on a real Slurm: two nodes, a failing job, a preempted job that saves, requeues and resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import fork_server
from tests.common.environment import nccl_stub
from tests.launcher.executors import blended
from tests.launcher.executors.conftest import Slurm

pytestmark = [pytest.mark.nemo, pytest.mark.daemons]

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = """
partition: low
nodes: 2
devices_per_node: 2
env: {OMP_NUM_THREADS: "1"}
"""
SHORT = ("trainer.log_every_n_steps=1", "trainer.val_check_interval=1000")


def _command(tmp_path: Path, sample: Path, *words: str, cluster: str = CLUSTER) -> list[str]:
    (tmp_path / "cluster.yaml").write_text(cluster)
    paths = [f"data.paths={sample / 'prose'}", f"data.index_mapping_dir={tmp_path / 'cache'}"]
    start = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--executor", "slurm"]
    return [*start, "--cluster", str(tmp_path / "cluster.yaml"), *words, *paths, *SHORT]


def _launch(slurm: Slurm, folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=slurm.env, capture_output=True, text=True, timeout=300)


def _losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def _job_id(text: str) -> str:
    found = re.search(r"Slurm job (\d+)", text)
    assert found, text
    return found[1]


def test_two_nodes_train_and_a_second_job_is_refused(slurm: Slurm, sample: Path, tmp_path: Path) -> None:
    """Two tasks on two nodes; what is printed is true, rank 0's lines are followed, every rank has its log."""
    words = ("--name", "two", "--nodes", "2", "trainer.max_steps=4")
    done = _launch(slurm, tmp_path, _command(tmp_path, sample, *words))
    assert done.returncode == 0, done.stderr
    run, job = tmp_path / "runs" / "two", _job_id(done.stderr)
    assert sorted(_losses(run)) == [1, 2, 3, 4]
    assert f"scancel {job}" in done.stderr and "step 4/4" in done.stderr and "launch.py resume two" in done.stderr
    assert {path.name for path in (run / "logs/attempt-1").glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}
    shown = slurm("scontrol", "--oneliner", "show", "job", job)
    assert "NumNodes=2" in shown and "NumTasks=2" in shown and "JobState=COMPLETED" in shown
    assert (run / "slurm" / f"log-two_{job}_0.out").is_file()


def test_the_failing_rank_is_heard(slurm: Slurm, sample: Path, tmp_path: Path) -> None:
    """Real training code fails in the job: the command fails, and shows that rank's traceback."""
    (tmp_path / "cache").write_text("a file where the ranks want a folder")
    words = ("--name", "bad", "--devices", "2", "trainer.max_steps=4")
    done = _launch(slurm, tmp_path, _command(tmp_path, sample, *words))
    assert done.returncode == 1, done.stderr
    said = done.stderr[done.stderr.index("failed first") :]
    assert re.match(r"failed first, on \S+:\nTraceback", said), said
    assert "Error" in said and "cache" in said and "ended as FAILED" in said
    assert "JobState=FAILED" in slurm("scontrol", "--oneliner", "show", "job", _job_id(done.stderr))


def test_preempted_saves_requeues_resumes(slurm: Slurm, sample: Path, tmp_path: Path) -> None:
    """A job of a higher partition takes the nodes: the run saves and makes room, comes back, and ends exactly."""
    words = ("--name", "pre", "--devices", "2", "trainer.max_steps=120", "log.ckpt.every_n_train_steps=1000")
    run = tmp_path / "runs" / "pre"
    with (tmp_path / "said").open("w") as out:
        launcher = subprocess.Popen(_command(tmp_path, sample, *words), cwd=tmp_path, env=slurm.env, stderr=out)
    _wait(lambda: (run / "metrics.jsonl").exists() and max(_losses(run), default=0) >= 3, 120, tmp_path / "said")
    slurm("sbatch", "-p", "high", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 2")
    assert launcher.wait(timeout=300) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    job = _job_id(said)
    assert re.search(rf"job {job}: RUNNING, requeued 1 time", said), said
    stopped = int(re.search(r"resume: from runs/pre/checkpoints/step-(\d+)", said)[1])  # type: ignore[index]
    assert 3 <= stopped < 120  # the save was the stop's own: none was due before step 1000
    assert sorted(_losses(run)) == list(range(1, 121))
    states = [json.loads(path.read_text())["state"] for path in sorted((run / "logs/attempt-1").glob("rank-*.json"))]
    assert states == ["interrupted", "interrupted"]
    assert "Restarts=1" in slurm("scontrol", "--oneliner", "show", "job", job)


def _wait(ready: Any, seconds: float, said: Path) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)


def test_ctrl_c_leaves_the_job_and_scancel_ends_it(slurm: Slurm, sample: Path, tmp_path: Path) -> None:
    """Following is not the job; a second job of the same run is refused; a cancelled job does not come back."""
    words = ("--name", "left", "trainer.max_steps=100000")
    command = _command(tmp_path, sample, *words, cluster=CLUSTER + "slurm: {sbatch: {hold: true}}\n")
    with (tmp_path / "said").open("w") as out:
        launcher = subprocess.Popen(command, cwd=tmp_path, env=slurm.env, stderr=out)
    _wait(lambda: "PENDING" in (tmp_path / "said").read_text(), 120, tmp_path / "said")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=30) == 130
    job = _job_id((tmp_path / "said").read_text())
    assert "continues" in (tmp_path / "said").read_text()
    again = _launch(slurm, tmp_path, command)
    assert again.returncode == 2 and f"job {job}, PENDING" in again.stderr, again.stderr
    slurm("scancel", job)
    assert "JobState=CANCELLED" in slurm("scontrol", "--oneliner", "show", "job", job)


def test_the_tier_is_added_and_sbatch_is_quoted_when_it_refuses(slurm: Slurm, sample: Path, tmp_path: Path) -> None:
    done = _launch(
        slurm, tmp_path, _command(tmp_path, sample, "--name", "none", cluster="partition: nowhere\ntier: dev\n")
    )
    assert done.returncode == 2
    assert "env: dev is added (the cluster file's)" in done.stderr and "NCCL_DEBUG=" in done.stderr
    assert "Slurm refused the job" in done.stderr and "invalid partition" in done.stderr


@pytest.mark.skipif(not shutil.which("gcc"), reason="SKIPPED FOR LACK OF gcc: no VCCL library is built")
def test_vccl_of_the_cluster_file_is_loaded_on_the_nodes(slurm: Slurm, sample: Path, tmp_path: Path) -> None:
    """The launcher never looks at the library; each rank checks it and starts again with it, or says what is wrong."""
    for folder in ("vccl", "plain"):
        (tmp_path / folder).mkdir()
    library = nccl_stub.build(tmp_path / "vccl")
    nccl_stub.build(tmp_path / "plain", own=False)
    lines = {"VCCL_LIBRARY": str(tmp_path / "vccl"), "NCCL_IB_HCA": "mlx5_9:1", "OMP_NUM_THREADS": "1"}
    cluster = f"partition: low\nnodes: 2\ncollectives: vccl-ft\nenv: {json.dumps(lines)}\n"
    words = ("--nodes", "2", "trainer.max_steps=2")
    done = _launch(slurm, tmp_path, _command(tmp_path, sample, "--name", "vccl", *words, cluster=cluster))
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        log = (tmp_path / f"runs/vccl/logs/attempt-1/rank-{rank}.log").read_text()
        assert f"VCCL: {library} (NCCL 2.26.6) is loaded" in log
    rows = {row["key"]: row for row in json.loads((tmp_path / "runs/vccl/env.json").read_text())}
    assert rows["NCCL_IB_HCA"]["value"] == "mlx5_9:1" and rows["NCCL_IB_HCA"]["source"] == "cluster file"
    script = (tmp_path / "runs/vccl/slurm/vccl.sbatch").read_text()
    assert "export NCCL_ENABLE_FAULT_TOLERANCE=1" in script and "LD_PRELOAD" not in script
    plain = cluster.replace(str(tmp_path / "vccl"), str(tmp_path / "plain"))
    done = _launch(slurm, tmp_path, _command(tmp_path, sample, "--name", "plain", *words, cluster=plain))
    assert done.returncode == 2, done.stderr
    assert "failed first" in done.stderr and "this is plain NCCL, not VCCL" in done.stderr


def test_doctor_shows_every_node(slurm: Slurm, tmp_path: Path) -> None:
    """`doctor --cluster` runs on both nodes: a row for each, the slowest link, one word."""
    (tmp_path / "c.yaml").write_text(CLUSTER.replace("devices_per_node: 2", "devices_per_node: 1"))
    command = [sys.executable, str(ROOT / "launch.py"), "doctor", "--cluster", "c.yaml", "--env", "cpu"]
    done = _launch(slurm, tmp_path, command)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stderr.splitlines() if re.match(r"│ [01] ", line)]
    assert len(rows) == 2 and all("GB/s" in row for row in rows), done.stderr
    assert re.search(r"slowest link: \S+ -> \S+, \d+\.\d\d GB/s", done.stderr) and "mode: gloo" in done.stderr


def test_stock_container_flags_are_rejected_by_this_slurm(slurm: Slurm) -> None:
    """Why NeMo-Run's batch script is not used: plain Slurm knows no --container-mounts (pyxis does)."""
    done = subprocess.run(
        ["srun", "--container-mounts", "/a:/b", "true"], env=slurm.env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "unrecognized option" in done.stderr


@pytest.fixture
def sshd(slurm: Slurm, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A real sshd on loopback whose sessions see this Slurm; its port and a key that it lets in."""
    program = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
    if program is None:
        pytest.skip("NO SSH SERVER HERE: sshd not installed")
    folder = slurm.folder / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": "none",
        "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
        "SetEnv": f"SLURM_CONF={slurm.folder}/slurm.conf", "Subsystem": "sftp internal-sftp",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in options.items()))
    with (folder / "log").open("w") as out:
        daemon = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "config")], stderr=out)
    try:
        time.sleep(0.5)
        yield port, folder / "user"
    finally:
        daemon.terminate()
        daemon.wait(timeout=10)
        shutil.rmtree(folder)


def _far_cluster(there: Path, sshd: tuple[int, Path]) -> str:
    """A cluster file for this Slurm, reached through the ssh server, with its checkout in `there`."""
    port, key = sshd
    tunnel = {"kind": "ssh", "host": "127.0.0.1", "user": "root", "port": port, "identity": str(key)}
    file = {"partition": "low", "workdir": str(there), "python": sys.executable, "tunnel": tunnel}
    served = {**fork_server.variables(), "PYTHONPATH": fork_server.python_path(ROOT)}
    return str(yaml.safe_dump({**file, "env": served}))


def _launch_far(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    where = [] if words[0] == "resume" else ["--executor", "slurm", "--cluster", "cluster.yaml"]
    command = [sys.executable, str(ROOT / "launch.py"), *words, *where]
    away = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return subprocess.run(command, cwd=here, env=away, capture_output=True, text=True, timeout=300)


def test_over_ssh(slurm: Slurm, sshd: tuple[int, Path], sample: Path, tmp_path: Path) -> None:
    """A blend and a base model that exist over there only: checked, read and recorded there; its lines come back."""
    there, here = tmp_path / "it's there; touch x", tmp_path / "here"
    here.mkdir()
    blended.place_data(there, sample)
    (here / "cluster.yaml").write_text(_far_cluster(there, sshd))
    done = _launch_far(here, "--recipe", blended.RECIPE, "--name", "far", *blended.WORDS)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stderr and f"ssh -p {sshd[0]} root@127.0.0.1 'scancel" in done.stderr
    assert "blend: code" in done.stderr
    blended.check_records(there / "runs" / "far")
    trained = {"data.json", "blend.json", "base.json", "metrics.jsonl", "checkpoints", "logs"}
    assert trained <= {path.name for path in (there / "runs/far").iterdir()}
    assert not trained & {path.name for path in (here / "runs/far").iterdir()}
    assert not (there / "x").exists()
    recorded = (here / "runs/far/spec.json").read_text()
    again = _launch_far(here, "--recipe", blended.RECIPE, "--name", "far", *blended.WORDS, "optim.config.lr=1e-4")
    assert again.returncode == 2 and "on the cluster holds a run already" in again.stderr, again.stderr
    assert (here / "runs/far/spec.json").read_text() == recorded
    more = _launch_far(here, "resume", "far", f"trainer.max_steps={blended.STEPS + 2}")
    assert more.returncode == 0, more.stderr
    assert sorted(_losses(there / "runs" / "far")) == [1, 2, 3, 4, 5]
    assert {path.name for path in (there / "runs/far/logs").iterdir()} == {"attempt-1", "attempt-2"}
    blended.check_afterwards(there / "runs" / "far", here)


def test_over_ssh_a_missing_corpus_is_said(slurm: Slurm, sshd: tuple[int, Path], tmp_path: Path) -> None:
    """The launcher cannot look there; the first rank does, before it imports NeMo, and the command fails with 3."""
    there, here = tmp_path / "there", tmp_path / "here"
    here.mkdir()
    there.mkdir()
    (here / "cluster.yaml").write_text(_far_cluster(there, sshd))
    done = _launch_far(here, "--recipe", blended.RECIPE, "--name", "none", *blended.WORDS)
    assert done.returncode == 3, done.stderr
    assert "failed first" in done.stderr and "corpora/sample/code is not a prepared corpus" in done.stderr
    assert "no base model in models/qwen25-tiny" in done.stderr
