"""Real torchrun on the CPU with Gloo: two ranks train as one process does, in every layout.

Tolerance: 2e-5 nats on every one of ten losses in fp32 (other sums, other order; measured: 5e-6 at most). What stock
Megatron cannot do here: sequence and context parallelism (they need Transformer Engine), and the distributed
optimizer's resume (it needs TE or Apex).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common import rank_states
from common.rundir import RunDir
from report.evaluation import harness
from tests import fork_server

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[3]
WORDS = (
    "trainer.max_steps=15",
    "trainer.val_check_interval=15",
    "trainer.log_every_n_steps=1",
    "log.ckpt.every_n_train_steps=5",
    "log.ckpt.keep_last=3",
    "optim.lr_scheduler.warmup_steps=5",
)
TOLERANCE = 2e-5
SHAPES = {
    "tp": ("trainer.strategy.tensor_model_parallel_size=2",),
    "pp": ("trainer.strategy.pipeline_model_parallel_size=2", "data.micro_batch_size=1"),
    "vp": (
        "trainer.strategy.pipeline_model_parallel_size=2",
        "trainer.strategy.virtual_pipeline_model_parallel_size=2",
        "data.micro_batch_size=1",
        "model.config.overlap_p2p_comm=True",
        "model.config.batch_p2p_comm=False",
    ),
}


def command(sample: Path, name: str, *words: str) -> list[str]:
    paths = (f"data.paths={sample / 'prose'}", "data.index_mapping_dir=cache")
    return [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--name", name, *paths, *WORDS, *words]


def run(folder: Path, sample: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    bare = {key: os.environ[key] for key in ("HOME", "HF_HUB_OFFLINE") if key in os.environ}
    environ = {**bare, "PATH": "/usr/bin:/bin", **fork_server.variables()}  # no active virtual environment
    return subprocess.run(command(sample, name, *words), cwd=folder, env=environ, capture_output=True, text=True)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses(found: list[dict[str, Any]], after: int = 0) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in found if "loss" in row and row["step"] > after}


def gates(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / name / "gates.json").read_text())
    return found


@pytest.fixture(scope="module")
def folder(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, 15 steps, a checkpoint every 5: runs/single."""
    folder = tmp_path_factory.mktemp("parallel")
    done = run(folder, sample, "single")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("shape", SHAPES)
def test_model_parallel_goes_on_where_one_process_was(shape: str, folder: Path, sample: Path) -> None:
    """From the single run's step 5, split over two ranks: the same ten losses, tokens, parameters, validation."""
    shutil.copytree(folder / "runs/single", folder / "runs" / shape)
    for step in (10, 15):
        shutil.rmtree(folder / "runs" / shape / "checkpoints" / f"step-{step}")
    (folder / "runs" / shape / "metrics.jsonl").unlink()
    done = run(folder, sample, shape, "--resume", "--executor", "local", "--devices", "2", *SHAPES[shape])
    assert done.returncode == 0, done.stderr
    expected, found = rows(folder, "single"), rows(folder, shape)
    assert losses(found) == pytest.approx(losses(expected, after=5), abs=TOLERANCE)
    assert len(losses(found)) == 10
    assert found[-1]["unmasked_tokens"] == expected[-1]["unmasked_tokens"] == 15 * 4 * 256
    assert found[-2]["val_loss"] == pytest.approx(expected[-2]["val_loss"], abs=TOLERANCE)
    assert gates(folder, shape) == gates(folder, "single")
    assert {"rank-0.log", "rank-1.log"} <= {p.name for p in (folder / "runs" / shape / "logs/attempt-2").iterdir()}


def test_data_parallel_killed_and_resumed(folder: Path, sample: Path) -> None:
    """From scratch on two replicas; rank 1 is killed after a checkpoint; the resumed run ends as one process does."""
    words = ("--executor", "local", "--devices", "2", "trainer.max_steps=100", "log.ckpt.keep_last=20")
    first = subprocess.Popen(command(sample, "dp", *words), cwd=folder, stderr=subprocess.PIPE, text=True)
    assert first.stderr is not None
    seen = ""
    for line in first.stderr:
        seen += line
        if RunDir("dp", folder / "runs").complete_checkpoints():
            (victim,) = (s for s in rank_states.read(folder / "runs/dp/logs/attempt-1") if s.rank == 1)
            os.kill(victim.pid, signal.SIGKILL)
            break
    rest = first.stderr.read()
    assert first.wait() == 1, seen + rest
    assert re.search("rank (0, )?1 ended without an error message", rest)  # torchrun kills a rank 0 that is too slow
    if "rank 0 failed later:" in rest:  # on a busy machine torchrun ends rank 0 before it misses rank 1
        assert rest.index("rank 1 ended") < rest.index("rank 0 failed later:")
    for path in RunDir("dp", folder / "runs").complete_checkpoints():
        if path.name != "step-5":  # how far it came before the kill is a matter of luck
            shutil.rmtree(path)
    done = run(folder, sample, "dp", "--resume", "--executor", "local", "--devices", "2")
    assert done.returncode == 0, done.stderr
    assert "data.micro_batch_size: 4 -> 2 samples" in seen
    assert "data.micro_batch_size=2 (as this run began)" in done.stderr
    expected, found = rows(folder, "single"), rows(folder, "dp")
    # the killed run may have trained beyond step 15
    first_steps = {step: loss for step, loss in losses(found).items() if step <= 15}
    assert first_steps == pytest.approx(losses(expected), abs=TOLERANCE)
    assert found[-1]["unmasked_tokens"] == found[-1]["consumed_tokens"]["prose"] == 15 * 4 * 256
    assert gates(folder, "dp") == gates(folder, "single")


def test_the_last_evaluation_of_two_ranks(folder: Path, sample: Path) -> None:
    """Both ranks stay until rank 0 has it; a rank that removed the copies would take it away from rank 0."""
    if not harness.is_installed():
        pytest.skip("the lm-evaluation-harness is not installed")
    words = ("trainer.max_steps=5", "evaluate.every_n_steps=5", "evaluate.tasks=bits", "evaluate.limit=2")
    done = run(folder, sample, "evaluated", "--executor", "local", "--devices", "2", *words)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(folder, "evaluated") if "evaluation" in row] == [5], done.stderr
    assert not (folder / "runs/evaluated/evaluating").exists()
    states = rank_states.read(folder / "runs/evaluated/logs/attempt-1")
    assert [state.state for state in states] == [rank_states.DONE] * 2
    assert states[0].time <= states[1].time


def test_virtual_stages_on_two_ranks_need_unbatched_messages(folder: Path, sample: Path) -> None:
    """Without the gate this run trains, on gradients of the wrong stage (norm 160 instead of 1)."""
    words = [word for word in SHAPES["vp"] if "p2p" not in word]
    done = run(folder, sample, "swapped", "--executor", "local", "--devices", "2", *words)
    assert done.returncode == 1
    assert "exchange each other's messages" in done.stderr
    assert not (folder / "runs/swapped/metrics.jsonl").exists()


def test_the_first_failing_ranks_error_is_printed_first(folder: Path, sample: Path) -> None:
    """A rank's own error, and the command's exit code: NeMo-Run 0.4.0 alone would say success."""
    done = run(folder, sample, "bad", "--executor", "local", "--devices", "2", "data.num_workers=-1")
    assert done.returncode == 1
    own = done.stderr.index("failed first:")
    assert "num_workers" in done.stderr[own:]
    assert not list((folder / "runs/bad").rglob("step-*"))


def test_ctrl_c_reaches_the_ranks(folder: Path, sample: Path) -> None:
    words = ("--executor", "local", "--devices", "2", "trainer.max_steps=400")
    stopped = subprocess.Popen(command(sample, "stopped", *words), cwd=folder, stderr=subprocess.PIPE, text=True)
    assert stopped.stderr is not None
    for line in stopped.stderr:
        if "step 3/" in line:
            stopped.send_signal(signal.SIGINT)
            break
    rest = stopped.stderr.read()
    assert stopped.wait() == 130, rest
    assert "launch.py resume stopped" in rest
    assert len(list((folder / "runs/stopped/checkpoints").glob("step-*"))) == 1
    deadline = time.monotonic() + 10
    ranks = rank_states.read(folder / "runs/stopped/logs/attempt-1")
    assert [s.state for s in ranks] == [rank_states.INTERRUPTED] * 2
    while any(Path(f"/proc/{s.pid}").exists() for s in ranks):
        assert time.monotonic() < deadline, "a rank outlived the command"
        time.sleep(0.1)
