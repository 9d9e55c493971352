"""A continual run whose corpora and base model lie where it trains, and nowhere else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import call_in_fork

ROOT = Path(__file__).resolve().parents[3]
RECIPE = "qwen25_tiny_cpt"  # reads corpora/sample/code, corpora/sample/prose and models/qwen25-tiny
STEPS = 3
WORDS = (f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=2")


def place_data(folder: Path, sample: Path) -> None:
    """Put the recipe's two corpora and its base model (of random weights) below `folder`."""
    for domain in ("code", "prose"):
        shutil.copytree(sample / domain, folder / "corpora" / "sample" / domain)
    call_in_fork(_write_base, folder / "models" / "qwen25-tiny", sample / "code" / "tokenizer", cwd=ROOT)


def _write_base(target: Path, tokenizer: Path) -> None:
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from recipes.qwen25 import TINY

    config = Qwen2Config(
        num_hidden_layers=TINY.num_layers, hidden_size=TINY.hidden_size, intermediate_size=TINY.ffn_hidden_size,
        num_attention_heads=TINY.num_attention_heads, num_key_value_heads=TINY.num_query_groups,
        vocab_size=TINY.vocab_size, tie_word_embeddings=TINY.tied, max_position_embeddings=256, rope_theta=1e6,
        initializer_range=0.02,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(target)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)


def check_records(run: Path) -> None:
    """What was trained, and the records of it, as a run that trains on the launcher's machine has them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert next(row for row in rows if "validation" in row)["validation"].keys() == {"code", "prose"}
    blend = json.loads((run / "blend.json").read_text())
    assert [domain["name"] for domain in blend["domains"]] == ["code", "prose"]
    assert blend["replay_share"] == 0.25 and blend["total_tokens"] == STEPS * 4 * 256
    data = json.loads((run / "data.json").read_text())
    assert [Path(folder).name for folder in data] == ["code", "prose"]
    assert all(set(manifest["splits"]) == {"train", "validation", "test"} for manifest in data.values())
    assert json.loads((run / "base.json").read_text())["source"].endswith("qwen25-tiny")


def check_afterwards(run: Path, home: Path) -> None:
    """What comes back has a report and a passport."""
    target = check_passport(run, home)
    done = _launch(home, "report", run.name)
    assert done.returncode == 0, done.stderr
    page = (target / "report.html").read_text()
    assert "25.0%" in page and "code" in page and "prose" in page


def check_passport(run: Path, home: Path) -> Path:
    """Bring the run back without its checkpoints to `home`, where no corpus is; returns it there, with its passport.

    The corpora are moved away meanwhile: the run has recorded their absolute paths, which another machine has not.
    """
    target = home / "runs" / run.name
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints", "index"), dirs_exist_ok=True)
    assert not list(home.rglob("*.bin"))
    corpora = run.parents[1] / "corpora"
    away = corpora.rename(corpora.with_name("corpora-of-the-cluster")) if corpora.exists() else None
    done = _launch(home, "passport", run.name)
    assert done.returncode == 0, done.stderr
    if away is not None:
        away.rename(corpora)
    items = {item["name"]: item for item in json.loads((target / "passport.json").read_text())["items"]}
    assert items["tokenizer"]["state"] == "pass" and items["step-0 loss"]["state"] == "pass", items
    assert items["data"]["state"] == "unknown" and "corpora/sample/code" in items["data"]["found"], items["data"]
    assert not [item for item in items.values() if item["state"] == "fail"], items
    return target


def _launch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "launch.py"), *words]
    return subprocess.run(command, cwd=home, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True)
