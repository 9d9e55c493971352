"""A resumed run on a GPU trains as an uninterrupted one does, with every lever on.

pytest tests/gpu     (a prepared corpus in corpora/mine)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.runs import ROOT, copy_without_end, train

SAVED, LAST = 40, 60

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not (ROOT / "corpora/mine").is_dir(), reason="no corpus in corpora/mine"),
]


def losses(folder: Path, name: str, *words: str) -> dict[int, float]:
    """Loss of each step that the run trained."""
    rows, printed = train(folder, name, "--recipe", "qwen25_500m_single", *words, saved=SAVED, last=LAST)
    assert "captured one micro batch" in printed
    return {step: row["loss"] for step, row in rows.items()}


def test_resume_with_the_levers_on(tmp_path: Path) -> None:
    """The five steps after the checkpoint, within 2e-3: weights, moments, step count and data order are restored.

    Later steps amplify what atomics in the backward pass round differently, as they do in two uninterrupted runs.
    """
    uninterrupted = losses(tmp_path, "uninterrupted")
    copy_without_end(tmp_path, "uninterrupted", "resumed", LAST)
    resumed = losses(tmp_path, "resumed", "--resume")
    assert min(resumed) == SAVED + 1
    again = losses(tmp_path, "again")
    for step in range(SAVED + 1, LAST + 1):
        print(step, uninterrupted[step], resumed[step] - uninterrupted[step], again[step] - uninterrupted[step])
    for step in range(SAVED + 1, SAVED + 6):
        assert resumed[step] == pytest.approx(uninterrupted[step], abs=2e-3), step
