"""Real mpirun on this machine; and a direct run inside somebody else's job."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common import rank_states
from tests.training.distributed.test_parallel import ROOT, TOLERANCE, command, losses, rows

pytestmark = [pytest.mark.nemo, pytest.mark.daemons]

STEPS = ("trainer.max_steps=10",)
MPIRUN = ("--executor", "mpirun", "--devices", "2")
# variables of a Slurm task and of an MPI rank that is not the first
AROUND = {
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "nowhere",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "nowhere",
    "MASTER_PORT": "1",
}


@pytest.fixture(scope="module")
def folder(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process inside a Slurm job and under mpirun stays one process: runs/single."""
    folder = tmp_path_factory.mktemp("mpirun")
    done = subprocess.run(
        command(sample, "single", *STEPS), cwd=folder, env={**os.environ, **AROUND}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "direct: one process; LOCAL_RANK, OMPI_*, RANK, SLURM_*, WORLD_SIZE of the job around" in done.stderr
    assert len(losses(rows(folder, "single"))) == 10
    return folder


@pytest.fixture(autouse=True)
def _needs_mpirun() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("SKIPPED, NOT TESTED: no mpirun on this machine (apt-get install openmpi-bin)")


def test_typed_by_hand_after_a_dry_run(folder: Path, sample: Path) -> None:
    """The printed command, copied: two ranks, the losses of one process."""
    asked = command(sample, "hand", *STEPS, *MPIRUN, "--dryrun", "--write")
    dry = subprocess.run(asked, cwd=folder, capture_output=True, text=True)
    assert dry.returncode == 0, dry.stderr
    printed = next(line for line in dry.stderr.splitlines() if line.startswith("env "))
    assert not (folder / "runs/hand/logs").exists()
    done = subprocess.run(shlex.split(printed), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert losses(rows(folder, "hand")) == pytest.approx(losses(rows(folder, "single")), abs=TOLERANCE)
    assert {s.state for s in rank_states.read(folder / "runs/hand/logs/attempt-1")} == {rank_states.DONE}


def test_hostfile_ctrl_c_and_resume(folder: Path, sample: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2  # this machine\n")
    (folder / "cluster.yaml").write_text("devices_per_node: 2\nmpirun:\n  hostfile: hosts\n")
    words = (*MPIRUN, "--cluster", "cluster.yaml")
    asked = command(sample, "stopped", "trainer.max_steps=100", *words)
    stopped = subprocess.Popen(asked, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert stopped.stderr is not None
    for line in stopped.stderr:
        if "step 3/" in line:
            stopped.send_signal(signal.SIGINT)
            break
    rest = stopped.stderr.read()
    assert stopped.wait() == 130, rest
    assert "launch.py resume stopped" in rest
    again = [sys.executable, str(ROOT / "launch.py"), "resume", "stopped", *STEPS]
    done = subprocess.run(again, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = losses(rows(folder, "single"))
    found = {step: loss for step, loss in losses(rows(folder, "stopped")).items() if step in expected}
    assert found == pytest.approx(expected, abs=TOLERANCE)


def test_what_goes_wrong_is_said(folder: Path, sample: Path) -> None:
    """A failing rank's own error; fewer hosts than nodes; another number of ranks than written."""
    bad = command(sample, "bad", *STEPS, *MPIRUN, "data.num_workers=-1")
    done = subprocess.run(bad, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1
    assert "num_workers" in done.stderr[done.stderr.index("failed first:") :]
    many = command(sample, "many", *STEPS, *MPIRUN, "--nodes", "2", "data.micro_batch_size=1")
    done = subprocess.run(many, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2 and "hostfile" in done.stderr
