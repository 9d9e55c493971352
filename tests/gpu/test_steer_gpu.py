"""A forgetting budget and a merge on a GPU, with data workers and every lever on.

pytest tests/gpu     (a prepared corpus in corpora/mine)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.ledger import read_ledger
from tests.gpu.runs import ROOT, train

SAVED, LAST, INTERVAL = 40, 60, 20

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not (ROOT / "corpora/mine").is_dir(), reason="no corpus in corpora/mine"),
]


def test_workers_read_what_the_budget_decided_and_a_merge_is_validated(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "corpora/mine", tmp_path / "old")
    domains = [
        {"name": "mine", "folder": str(ROOT / "corpora/mine"), "role": "new"},
        {"name": "old", "folder": str(tmp_path / "old"), "role": "replay"},
    ]
    blend = tmp_path / "blend.json"
    blend.write_text(json.dumps({"domains": domains, "replay_share": 0.25}))
    words: tuple[str, ...] = (
        "--recipe",
        "qwen25_500m_single",
        "data.global_batch_size=4",
        "data.paths=None",
        f"data.blend={blend}",
    )
    words += ("forgetting_budget={'old': 0.1}", f"trainer.val_check_interval={INTERVAL}", "data.num_workers=2")
    train(tmp_path, "run", *words, saved=SAVED, last=LAST)
    run = tmp_path / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    decided = [row["forgetting_budget"] for row in rows if "next_share" in row.get("forgetting_budget", {})]
    steps = range(INTERVAL, LAST + 1, INTERVAL)
    assert len(decided) == len(steps)
    assert all(row["from_step"] > step for row, step in zip(decided, steps, strict=True))
    ledger = read_ledger(run / "ledger.json")
    counted = [row["consumed_tokens"] for row in rows if "consumed_tokens" in row][-1]
    assert counted == {name: count * ledger.seq_length for name, count in ledger.read.items()}
    _merge(tmp_path, [row["validation"] for row in rows if "validation" in row][-1])


def _merge(folder: Path, recorded: dict[str, dict[str, float]]) -> None:
    """The table of `soup` shows the newest checkpoint's losses as the run recorded them."""
    command = [sys.executable, str(ROOT / "launch.py"), "soup", "run", "--shape", "uniform"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    for name, row in recorded.items():
        line = next(line for line in done.stdout.splitlines() if name in line and "│" in line)
        assert float(line.split("│")[2]) == pytest.approx(row["loss"], abs=2e-3)
