"""Preflight on real prepared folders: every finding says expected, found and what to do."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import machine_facts
from common.rundir import RunDir
from data.block_hashes import CHECKED, hash_blocks
from data.manifest import load_manifest
from launcher.preflight import check as preflight
from launcher.preflight.findings import Finding
from recipes import registry
from recipes.plan import Plan


@pytest.fixture
def corpus(sample: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample / "prose", tmp_path / "corpus"))


def _check(corpus: Path, **changes: Any) -> list[Finding]:
    plan = dataclasses.replace(registry.resolve("qwen25_tiny").plan, data=str(corpus), **changes)
    return preflight.check(plan, RunDir("run", corpus.parent / "runs"))


def _only(findings: list[Finding], fatal: bool = True) -> str:
    assert [f.fatal for f in findings] == [fatal], [str(f.problem) for f in findings]
    problem = findings[0].problem
    assert problem.expected and problem.found and problem.do
    return str(problem)


def test_a_good_plan_has_no_findings(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert _check(corpus) == []
    assert [record.message for record in caplog.records] == [
        "preflight: 12 checks passed (packages, batch and sequence, parallel layout, schedule, blend, GPUs,"
        " memory and ports, loggers, corpora, base model, disk, peak memory)"
    ]


def test_what_is_checked_where_the_ranks_run(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A machine or files that are not here are left to the ranks, and that is said; a finding is logged."""
    plan = dataclasses.replace(registry.resolve("qwen25_tiny").plan, data="nowhere")
    with caplog.at_level(logging.INFO):
        assert preflight.check(plan, RunDir("run", corpus.parent), machine=False, data=False) == []
        assert preflight.check(plan, RunDir("run", corpus.parent), machine=False)
    said = [record.message for record in caplog.records]
    assert said[0] == "preflight: 5 checks passed (packages, batch and sequence, parallel layout, schedule, blend)"
    assert (
        said[1]
        == "preflight: the ranks check GPUs, base model, corpora, disk, loggers, memory and ports when they start"
    )
    assert said[2].startswith("nowhere is not a prepared corpus")
    assert said[3] == "preflight: the ranks check GPUs, loggers, memory and ports when they start"


def test_flipped_bytes_are_found(corpus: Path) -> None:
    """By the hashes that `data prepare` records; a manifest of an earlier version has none, and is accepted."""
    manifest = load_manifest(corpus)
    splits = {name: dataclasses.replace(facts, bin_blocks=[]) for name, facts in manifest.splits.items()}
    dataclasses.replace(manifest, splits=splits).save(corpus)
    data = bytearray((corpus / "train.bin").read_bytes())
    blocks = {name: hash_blocks(corpus / f"{name}.bin") for name in splits}
    data[-1] ^= 1
    (corpus / "train.bin").write_bytes(data)
    assert _check(corpus) == []
    splits = {name: dataclasses.replace(facts, bin_blocks=blocks[name]) for name, facts in splits.items()}
    dataclasses.replace(manifest, splits=splits).save(corpus)
    assert len(blocks["train"]) <= CHECKED
    assert "train.bin is not as it was prepared" in _only(_check(corpus))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]"])
def test_a_base_model_without_a_readable_config(corpus: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text(text)
    assert "base/config.json cannot be read" in _only(_check(corpus, base=str(tmp_path / "base")))


def test_missing_files(corpus: Path) -> None:
    (corpus / "train.idx").unlink()
    assert "train.idx" in _only(_check(corpus))
    (corpus / "validation.bin").unlink()
    assert len(_check(corpus)) == 2  # all at once
    assert "is not a prepared corpus" in _only(_check(corpus.parent / "nowhere"))


def test_everything_that_a_continual_run_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each corpus of the blend and the base model, all at once, with the command that makes it."""
    monkeypatch.chdir(tmp_path)
    plan = registry.resolve("qwen25_tiny_cpt").plan
    findings = [str(finding.problem) for finding in preflight.check(plan, RunDir("run"), machine=False)]
    code, prose, base = findings
    assert code.startswith("corpora/sample/code is not a prepared corpus") and "launch.py data sample" in code
    assert prose.startswith("corpora/sample/prose is not a prepared corpus")
    assert base.startswith("no base model in models/qwen25-tiny") and "make demo" in base


def test_truncated_bin_and_idx(corpus: Path) -> None:
    with (corpus / "train.bin").open("r+b") as stream:
        stream.truncate(1000)
    assert "train.bin" in _only(_check(corpus))
    with (corpus / "train.idx").open("r+b") as stream:
        stream.truncate(30)
    assert "train.idx" in _only(_check(corpus))


def test_numbers(corpus: Path) -> None:
    assert "do this: data.global_batch_size=6" in _only(_check(corpus, global_batch_size=7, micro_batch_size=3))
    assert "sequence length is not the model's" in _only(_check(corpus, model_seq_length=128))
    assert "model-parallel groups" in _only(_check(corpus, tensor_parallel=2))
    assert "must be positive" in _only(_check(corpus, micro_batch_size=0))
    assert "must be positive" in _only(_check(corpus, val_check_interval=0))
    assert "must be positive" in _only(_check(corpus, evaluate_every_n_steps=0))
    problem = _only(_check(corpus, save_every_n_steps=5, evaluate_every_n_steps=7))
    assert "no checkpoint is written at the steps to evaluate" in problem and "evaluate.every_n_steps=5" in problem
    assert _check(corpus, save_every_n_steps=5, evaluate_every_n_steps=10) == []
    odd = dataclasses.replace(registry.resolve("qwen25_tiny").plan.shape, num_attention_heads=3)
    assert "not divisible" in str(_check(corpus, shape=odd)[0].problem)


def test_a_sequence_longer_than_a_split(corpus: Path) -> None:
    findings = _check(
        corpus, seq_length=65536, model_seq_length=65536, max_steps=1, warmup_steps=0, val_check_interval=1
    )
    assert {"validation", "test"} <= {str(f.problem).split()[1] for f in findings if f.fatal}


def test_schedule_warnings_do_not_stop_a_run(corpus: Path) -> None:
    assert "warm-up is longer" in _only(_check(corpus, warmup_steps=500, decay_end=600), fatal=False)
    assert "validation interval is longer" in _only(_check(corpus, val_check_interval=500), fatal=False)
    assert "more than 4 times" in _only(_check(corpus, max_steps=5000), fatal=False)


def test_tokenizer_larger_than_the_vocabulary(corpus: Path) -> None:
    small = dataclasses.replace(registry.resolve("qwen25_tiny").plan.shape, vocab_size=4000)
    assert "larger than the model's vocabulary" in _only(_check(corpus, shape=small))


def test_the_same_prefix_for_training_and_validation(corpus: Path) -> None:
    same = repr(
        {"train": [str(corpus / "train")], "validation": [str(corpus / "train")], "test": [str(corpus / "test")]}
    )
    plan: Plan = dataclasses.replace(registry.resolve("qwen25_tiny").plan, data=same)
    text = _only(preflight.check(plan, RunDir("run", corpus.parent / "runs")))
    assert "also in validation" in text


def test_a_malformed_dict_of_prefixes(corpus: Path) -> None:
    for paths in ("{'validation': ['a']}", "{'train': 'a', 'validation': 'b', 'test': 'c'}"):
        plan: Plan = dataclasses.replace(registry.resolve("qwen25_tiny").plan, data=paths)
        assert "not of NeMo's form" in _only(preflight.check(plan, RunDir("run", corpus.parent / "runs")))


def test_a_gpu_recipe_without_a_gpu(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_facts, "query_gpus", machine_facts.Gpus)
    assert "--recipe qwen25_tiny" in _only(_check(corpus, accelerator="gpu"))
    card = machine_facts.Gpu(0, "card", 80 * 10**9, 80 * 10**9, "0", 0)
    monkeypatch.setattr(machine_facts, "query_gpus", lambda: machine_facts.Gpus(visible=(card,)))
    assert "trainer.devices=1" in _only(_check(corpus, accelerator="gpu", devices=2, global_batch_size=16))


def test_disk(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    assert "not enough disk" in _only(_check(corpus))
    (corpus.parent / "runs").write_text("a file where the folder should be")
    assert "cannot write" in _only(_check(corpus))


def test_shadowed_package(corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import data

    monkeypatch.setattr(data, "__file__", str(tmp_path / "site-packages" / "data" / "__init__.py"))
    assert "shadowed" in _only(_check(corpus))
