"""Two stages on a GPU, and a resume before and after the switch, with every lever on.

pytest tests/gpu     (a prepared corpus in corpora/mine)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from data.ledger import read_ledger
from tests.gpu.runs import ROOT, copy_without_end, train

SAVED, LAST = 40, 60
BATCH = 4
TOKENS = BATCH * 2048  # per step

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not (ROOT / "corpora/mine").is_dir(), reason="no corpus in corpora/mine"),
]


@pytest.mark.parametrize(
    ("recipe", "switch"),
    [
        pytest.param("qwen25_500m_single", SAVED + 3, id="306M-across-the-switch"),
        pytest.param("qwen25_500m", SAVED - 10, id="494M-in-the-second-stage"),
    ],
)
def test_a_resume_beside_a_switch(recipe: str, switch: int, tmp_path: Path) -> None:
    """The ledgers are equal, and so are the losses of the first five steps, within what atomics round differently."""
    shutil.copytree(ROOT / "corpora/mine", tmp_path / "old")
    domains = [
        {"name": "mine", "folder": str(ROOT / "corpora/mine"), "role": "new"},
        {"name": "old", "folder": str(tmp_path / "old"), "role": "replay"},
    ]
    stages = [{"until": switch * TOKENS}, {"replay_share": 0.5}]
    blend = tmp_path / "blend.json"
    blend.write_text(json.dumps({"domains": domains, "replay_share": 0.25, "stages": stages}))
    disk = "log.ckpt.keep_last=2"  # 494M: 6 GiB each
    words = ("--recipe", recipe, f"data.global_batch_size={BATCH}", "data.paths=None", f"data.blend={blend}", disk)
    whole, _ = train(tmp_path, "whole", *words, saved=SAVED, last=LAST)
    copy_without_end(tmp_path, "whole", "resumed", LAST)
    resumed, _ = train(tmp_path, "resumed", *words, "--resume", saved=SAVED, last=LAST)
    assert min(resumed) == SAVED + 1
    for step in range(SAVED + 1, SAVED + 6):
        assert resumed[step]["loss"] == pytest.approx(whole[step]["loss"], abs=2e-3), step
    first, second = (read_ledger(tmp_path / "runs" / name / "ledger.json") for name in ("whole", "resumed"))
    assert first.segments() == second.segments() and first.read == second.read
    assert [stage.first for stage in second.stages] == [0, switch]
    assert [(one.number, one.first) for one in second.attempts] == [(1, 0), (2, SAVED)]
