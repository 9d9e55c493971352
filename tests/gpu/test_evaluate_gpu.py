"""The evaluation on a GPU: bfloat16, and the same scores twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from report.evaluation import harness
from tests.report.test_local_tasks import DOCUMENTS

pytestmark = [pytest.mark.nemo, pytest.mark.gpu]


def test_a_model_scores_as_itself_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if not harness.is_installed():
        pytest.skip("the lm-evaluation-harness is not installed")
    from report.evaluation.evaluate import evaluate
    from report.evaluation.request import EvaluateRequest
    from tests.convert.test_convert import TIED, make_hf

    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    for name in ("one", "two"):
        make_hf(Path(name), **TIED, dtype=torch.bfloat16, eos_token_id=4095, bos_token_id=4095)
    found = evaluate(EvaluateRequest(model="one", against="two", text=["text.jsonl"], limit=8))
    assert (found.how["device"], found.how["dtype"]) == ("cuda", "bfloat16")
    assert [row.difference for row in found.rows] == [0.0] * 5
