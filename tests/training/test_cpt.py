"""Continual pretraining as a user runs it: base, export, continue with replay, and what must refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.rundir import RunDir
from data.blend_math import count_planned_samples
from tests.training.conftest import SHORT, train

pytestmark = pytest.mark.nemo


def _export() -> bool:
    from convert.export_run import export_run

    return export_run(Path("runs/base"), Path("base-hf")).ok


def _continue(sample: Path, base: str, **kwargs: Any) -> list[dict[str, Any]]:
    """qwen25_tiny_cpt on the sample corpora of `sample`."""
    from common.spec import RunSpec
    from launcher import launch as execute
    from recipes import registry

    recipe = registry.resolve("qwen25_tiny_cpt")
    assert isinstance(recipe.plan.blend, dict)
    blend = {**recipe.plan.blend, "domains": [dict(d) for d in recipe.plan.blend["domains"]]}
    for domain in blend["domains"]:
        domain["folder"] = str(sample / domain["name"])
    Path("blend.json").write_text(json.dumps(blend))
    words = ("data.blend=blend.json", f"resume.base={base}", f"data.index_mapping_dir={Path.cwd() / 'cache'}", *SHORT)
    name = kwargs.pop("name", "cpt")
    spec = RunSpec(recipe="qwen25_tiny_cpt", name=name, overrides=(*words, *kwargs.pop("words", ())), **kwargs)
    assert execute.launch(spec) == 0
    return [json.loads(line) for line in RunDir(name).metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def base(nemo: None, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in HF form, pretrained for a few steps: its folder."""
    from tests.conftest import call_in_fork

    folder = tmp_path_factory.mktemp("base")
    call_in_fork(train, sample, *SHORT, "trainer.max_steps=5", name="base", cwd=folder)
    assert call_in_fork(_export, cwd=folder)
    return folder / "base-hf"


def test_continue_with_replay(sample: Path, base: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    words = ("trainer.max_steps=10", "trainer.val_check_interval=5", "data.replay_share=0.25")
    rows = forked(_continue, sample, str(base), words=words)
    run = RunDir("cpt", tmp_path / "runs")
    step0 = json.loads(run.step0.read_text())
    assert abs(step0["megatron_loss"] - step0["hf_loss"]) <= 1e-5
    assert rows[0]["validation"].keys() == {"code", "prose"}
    assert rows[0]["step"] == 0
    _check_errors(run, rows)
    code, prose = count_planned_samples([0.75, 0.25], 10 * 4)
    assert rows[-1]["consumed_tokens"] == {"code": code * 256, "prose": prose * 256}
    gates = json.loads(run.gates.read_text())
    assert gates["tied"] is True
    assert len(set(gates["manifest_fingerprints"].values())) == 1
    _check_report_and_passport(run)


def _check_errors(run: RunDir, rows: list[dict[str, Any]]) -> None:
    """Every validation has its tokens and standard error; the change is paired with the first one."""
    from training.document_losses import load_first

    validated = [row for row in rows if "validation" in row]
    kept = load_first(run.first_validation)
    assert kept is not None and kept[0] == 0
    for name, documents in kept[1].items():
        first = validated[0]["validation"][name]
        assert documents.losses.sum() / documents.tokens.sum() == pytest.approx(first["loss"], rel=1e-12)
        assert documents.tokens.sum() == first["tokens"] == 4 * 256
        assert (first["change"], first["change_standard_error"]) == (0.0, 0.0)
        for row in validated:
            found = row["validation"][name]
            assert found["change"] == pytest.approx(found["loss"] - first["loss"], abs=1e-9)
            assert found["tokens"] == first["tokens"] and found["documents"] == first["documents"] > 2
            assert found["change_since"] == 0
        last = validated[-1]["validation"][name]
        assert last["change_standard_error"] > 0


def _continue_isolated(sample: Path, base: str) -> bool:
    """Continue with isolated documents, and export; whether the export has the checkpoint's logits."""
    from convert.export_run import export_run

    words = ("trainer.max_steps=2", "data.isolate_documents=True", "data.micro_batch_size=2")
    _continue(sample, base, words=words)
    return export_run(Path("runs/cpt"), Path("exported")).ok


def test_isolated_documents_start_from_their_base(
    sample: Path, base: Path, forked: Callable[..., Any], tmp_path: Path
) -> None:
    """Step 0 equals Hugging Face's loss with each document by itself, blends too; the export does not change."""
    assert forked(_continue_isolated, sample, str(base))
    run = RunDir("cpt", tmp_path / "runs")
    step0 = json.loads(run.step0.read_text())
    assert abs(step0["megatron_loss"] - step0["hf_loss"]) <= 1e-5
    files = ["config.json", "model.safetensors", "tokenizer.json"]
    config = [json.loads((folder / files[0]).read_text()) for folder in (base, tmp_path / "exported")]
    assert config[0] == config[1] and all((tmp_path / "exported" / name).is_file() for name in files)


def _check_report_and_passport(run: RunDir) -> None:
    """A real run fills every figure of its report, and passes every item that needs no export and no commit."""
    from report.figures import FIGURES
    from report.passport import make_passport
    from report.report import write_report

    states = {item.name: item.state for item in make_passport(run.path).items}
    assert states.pop("export") == "unknown"  # not exported
    states.pop("code version")  # unknown where the checkout has uncommitted changes
    assert set(states.values()) == {"pass"}, states
    page = write_report(run.path).read_text()
    missing = [name for name in FIGURES if not (run.path / "report" / f"{name}.png").is_file()]
    assert missing == ["forecast", "budget", "share", "power"]  # none was asked for, and there is no GPU
    assert "process on the CPU" in page  # the memory panel


def test_without_replay_the_old_domain_is_still_validated(sample: Path, base: Path, forked: Callable[..., Any]) -> None:
    rows = forked(_continue, sample, str(base), words=("trainer.max_steps=2", "data.replay_share=0.0"))
    assert rows[0]["validation"].keys() == {"code", "prose"}
    assert rows[-1]["consumed_tokens"] == {"code": 2 * 4 * 256}


def test_a_base_with_another_tokenizer_is_refused(
    sample: Path, base: Path, forked: Callable[..., Any], tmp_path: Path
) -> None:
    other = Path(shutil.copytree(base, tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"NFC"', '"NFKC"'))
    assert (other / "tokenizer.json").read_text() != text
    with pytest.raises(UserError, match="base model's tokenizer"):
        forked(_continue, sample, str(other), words=("trainer.max_steps=2",))


def test_a_base_of_another_shape_is_refused(
    sample: Path, base: Path, forked: Callable[..., Any], tmp_path: Path
) -> None:
    from common.errors import EXIT_PREFLIGHT

    with pytest.raises(AssertionError, match=f"{EXIT_PREFLIGHT} == 0"):
        forked(_continue, sample, str(base), words=("trainer.max_steps=2", "model.config.num_layers=2"))
    assert not (tmp_path / "runs" / "cpt").exists()


def test_the_step0_gate_sees_lost_weights(sample: Path, base: Path, forked: Callable[..., Any]) -> None:
    """As stock NeMo does without TE: the norms stay at their initial values. The run must stop."""
    from common.errors import GateError

    with pytest.raises(GateError, match="does not start from its base"):
        forked(_lose_a_norm, sample, str(base))


def _lose_a_norm(sample: Path, base: str) -> None:
    import torch

    from training import step0

    check = step0.check_step0

    def with_loss(trainer: Any, source: str, run: RunDir) -> None:
        with torch.no_grad():
            next(p for n, p in trainer.strategy.model.named_parameters() if "input_layernorm" in n).mul_(1.5)
        check(trainer, source, run)

    step0.check_step0 = with_loss
    _continue(sample, base, words=("trainer.max_steps=2",))


def _source_after_resume(sample: Path, base: str) -> tuple[str | None, list[str]]:
    """Continue, stop, resume; where the checkpoint's model files come from then, and the checkpoints kept."""
    from convert.export_hf import find_source

    words = ("log.ckpt.every_n_train_steps=1", "log.ckpt.keep_last=1", "log.ckpt.keep_best=code")
    _continue(sample, base, words=(*words, "trainer.max_steps=2"))
    _continue(sample, base, words=(*words, "trainer.max_steps=3"), resume=True)
    source = find_source(RunDir("cpt").complete_checkpoints()[-1])
    return str(source) if source else None, [p.name for p in RunDir("cpt").complete_checkpoints()]


def test_a_resumed_run_still_knows_its_base(sample: Path, base: Path, forked: Callable[..., Any]) -> None:
    source, kept = forked(_source_after_resume, sample, str(base))
    assert source is not None
    assert "imported" in source
    assert kept[-1] == "step-3"


def _samples(folder: str, steps: int) -> int:
    import types

    from data.module import PreparedDataModule

    data = PreparedDataModule(paths=folder, seq_length=64, micro_batch_size=1, global_batch_size=1)
    data.trainer = types.SimpleNamespace(global_step=0)
    data.build(steps, steps, 1, 1)
    train: Any = data._train_ds
    return int(train.document_index.max())


def test_a_corpus_prepared_again_is_read_anew(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    """Megatron's index cache goes by path: it would read the old documents of a corpus that has grown."""
    from data.prepare.prepare import prepare_corpus
    from data.prepare.request import PrepareRequest

    lines = (sample / "raw" / "prose.jsonl").read_text().splitlines()
    for documents in (60, 120):
        (tmp_path / "text.jsonl").write_text("\n".join(lines[:documents]) + "\n")
        request = PrepareRequest(
            inputs=[str(tmp_path / "text.jsonl")], output=tmp_path / "c", tokenizer=str(sample / "tokenizer"),
            split="80,10,10", overwrite=True, workers=1,
        )  # fmt: skip
        written = prepare_corpus(request).splits["train"].documents
        assert forked(_samples, str(tmp_path / "c"), 50) == written - 1
