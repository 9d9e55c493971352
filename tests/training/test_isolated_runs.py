"""Runs with isolated documents: one process, two ranks in each layout, resumed, and gates that see what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import GateError
from common.rundir import RunDir
from report.passport import make_passport
from tests import fork_server
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
ISOLATED = "data.isolate_documents=True"
WORDS = (
    "trainer.max_steps=8",
    "trainer.val_check_interval=8",
    "trainer.log_every_n_steps=1",
    "log.ckpt.every_n_train_steps=4",
    "log.ckpt.keep_last=3",
    "data.micro_batch_size=2",  # each micro batch weighs the same, whatever it has in the loss
)
TOLERANCE = 2e-5  # nats, as in tests/training/distributed/test_parallel.py
LAYOUTS = {
    "dp": (),
    "tp": ("trainer.strategy.tensor_model_parallel_size=2",),
    "vp": (
        "trainer.strategy.pipeline_model_parallel_size=2",
        "trainer.strategy.virtual_pipeline_model_parallel_size=2",
        "model.config.overlap_p2p_comm=True",
        "model.config.batch_p2p_comm=False",
    ),
}


@pytest.fixture(scope="module")
def short(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prose of the sample corpus in documents of about 60 tokens: the folder that holds `prose`."""
    from data.prepare.prepare import prepare_corpus
    from data.prepare.request import PrepareRequest

    folder = tmp_path_factory.mktemp("short")
    texts = [json.loads(line)["text"] for line in (sample / "raw/prose.jsonl").read_text().splitlines()[:120]]
    pieces = [text[at : at + 240] for text in texts for at in range(0, len(text), 240)]
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    inputs, tokenizer = [str(folder / "short.jsonl")], str(sample / "tokenizer")
    request = PrepareRequest(inputs=inputs, output=folder / "prose", tokenizer=tokenizer, split="90,5,5", workers=1)
    prepare_corpus(request)
    return folder


def command(folder: Path, short: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    asked = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--name", name]
    paths = (f"data.paths={short / 'prose'}", "data.index_mapping_dir=cache", ISOLATED)
    bare = {key: os.environ[key] for key in ("HOME", "HF_HUB_OFFLINE") if key in os.environ}
    environ = {**bare, "PATH": "/usr/bin:/bin", **fork_server.variables()}
    return subprocess.run([*asked, *paths, *WORDS, *words], cwd=folder, env=environ, capture_output=True, text=True)


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses(found: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in found if "loss" in row}


@pytest.fixture(scope="module")
def folder(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, eight steps, checkpoints at 4 and 8: runs/single."""
    folder = tmp_path_factory.mktemp("isolated")
    done = command(folder, short, "single")
    assert done.returncode == 0, done.stderr
    (folder / "single.log").write_text(done.stderr)
    return folder


def test_a_run_says_that_its_documents_are_isolated(folder: Path) -> None:
    log, run = (folder / "single.log").read_text(), RunDir("single", folder / "runs")
    assert log.count("data: the documents in a sequence are isolated") == 1
    assert "gates: documents are isolated" in log and "differs by more than 0 nats" in log
    assert "isolate_documents: true" in run.config.read_text()
    gates = json.loads(run.gates.read_text())
    assert gates["documents_isolated"] is True and gates["eod_in_loss"] is False
    states = {item.name: item.state for item in make_passport(run.path).items}
    assert states["documents"] == states["loss mask"] == states["end of document"] == "pass"
    assert 0.95 * 8 * 1024 < rows(folder, "single")[-1]["unmasked_tokens"] < 0.995 * 8 * 1024


def resume(folder: Path, short: Path, name: str, *words: str, original: str = "single") -> dict[int, float]:
    """The losses of a copy of a run that goes on from step 4 under another name."""
    copy = folder / "runs" / name
    shutil.copytree(folder / "runs" / original, copy)
    shutil.rmtree(copy / "checkpoints/step-8")
    (copy / "metrics.jsonl").unlink()
    done = command(folder, short, name, "--resume", *words)
    assert done.returncode == 0, done.stderr
    return losses(rows(folder, name))


@pytest.mark.slow
def test_a_resumed_run_is_bit_identical(folder: Path, short: Path) -> None:
    expected = {step: loss for step, loss in losses(rows(folder, "single")).items() if step > 4}
    assert resume(folder, short, "resumed") == expected and len(expected) == 4


@pytest.mark.slow
def test_stages_keep_documents_apart(folder: Path, short: Path, sample: Path) -> None:
    """The samples of the ledger's order know their borders as well, and a resume beside a switch is bit-identical."""
    domains = [
        {"name": "prose", "folder": str(short / "prose"), "role": "new"},
        {"name": "code", "folder": str(sample / "code"), "role": "replay"},
    ]
    stages = [{"until": 5 * 1024}, {"replay_share": 0.5}]
    (folder / "blend.json").write_text(json.dumps({"domains": domains, "replay_share": 0.25, "stages": stages}))
    words = ("data.paths=None", "data.blend=blend.json")
    done = command(folder, short, "staged", *words)
    assert done.returncode == 0, done.stderr
    assert "gates: documents are isolated" in done.stderr
    expected = {step: loss for step, loss in losses(rows(folder, "staged")).items() if step > 4}
    assert resume(folder, short, "staged-again", *words, original="staged") == expected and len(expected) == 4
    # of 8 x 1,024 tokens a third is code in long documents, the rest loses one token in about 60
    assert 0.97 * 8 * 1024 < rows(folder, "staged")[-1]["unmasked_tokens"] < 0.998 * 8 * 1024


@pytest.mark.parametrize(
    "layout", ["vp", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "vp")]
)
def test_two_ranks_train_as_one_process_does(layout: str, folder: Path, short: Path) -> None:
    """The same losses, tokens, validation and gates, from the single run's step 4 on."""
    found = resume(folder, short, layout, "--executor", "local", "--devices", "2", *LAYOUTS[layout])
    expected = rows(folder, "single")
    assert found == pytest.approx({step: loss for step, loss in losses(expected).items() if step > 4}, abs=TOLERANCE)
    assert len(found) == 4
    again = rows(folder, layout)
    assert again[-1]["unmasked_tokens"] == expected[-1]["unmasked_tokens"]
    assert again[-2]["val_loss"] == pytest.approx(expected[-2]["val_loss"], abs=TOLERANCE)
    records = [json.loads((folder / "runs" / name / "gates.json").read_text()) for name in (layout, "single")]
    assert records[0] == records[1]


def test_resuming_with_the_other_value_is_refused(folder: Path, short: Path) -> None:
    done = command(folder, short, "single", "--resume", "trainer.max_steps=9", "data.isolate_documents=False")
    assert done.returncode == 2
    assert "data.isolate_documents cannot change when a run is resumed" in done.stderr


def _leaking(short: Path) -> None:
    """A run whose attention ignores the borders."""
    from training import documents

    def causal(self: Any, num_tokens: int) -> Any:
        import torch

        return torch.ones(num_tokens // 256, 1, 256, 256, dtype=torch.bool).tril()

    documents.PackedDocuments.block_mask = causal
    train(short, *SHORT, "trainer.max_steps=2", ISOLATED)


def test_the_gate_sees_attention_across_a_border(short: Path, forked: Callable[..., Any]) -> None:
    with pytest.raises(GateError, match="not isolated"):
        forked(_leaking, short)
