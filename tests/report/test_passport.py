"""The passport: complete runs pass, and each item fails when its file is tampered with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.rundir import RunDir
from report.passport import Passport, make_passport
from tests.report.test_report import write_run


def _states(run: RunDir, **kwargs: Any) -> dict[str, str]:
    return {item.name: item.state for item in make_passport(run.path, **kwargs).items}


def _edit(run: RunDir, file: str, **changes: Any) -> None:
    path = run.path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_complete_run_passes(tmp_path: Path) -> None:
    result = make_passport(write_run(tmp_path).name, root=tmp_path / "runs")
    assert {item.state for item in result.items} == {"pass"} and len(result.items) == 12
    assert result.ok() and result.ok(strict=True) and result.exit_code(strict=True) == 0
    saved = json.loads(result.save().read_text())
    assert saved["ok_strict"] is True and saved["items"][1]["expected"] == "1,263,744 parameters"


def _flip_bin(run: RunDir) -> None:
    folder = Path(next(iter(json.loads((run.path / "data.json").read_text()))))
    content = bytearray((folder / "train.bin").read_bytes())
    content[3] ^= 1
    (folder / "train.bin").write_bytes(content)


def _prepare_again(run: RunDir) -> None:
    folder = Path(next(iter(json.loads((run.path / "data.json").read_text()))))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"]["tokens"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _other_corpus_tokenizer(run: RunDir) -> None:
    manifests = json.loads((run.path / "data.json").read_text())
    next(iter(manifests.values()))["tokenizer"]["fingerprint"] = "0" * 64
    (run.path / "data.json").write_text(json.dumps(manifests))


TAMPERED: list[tuple[str, Callable[[RunDir], None]]] = [
    ("truth gates", lambda run: _edit(run, "spec.json", gates=False)),
    ("architecture", lambda run: _edit(run, "gates.json", parameters=1_788_032)),
    ("architecture", lambda run: _edit(run, "gates.json", model={"num_layers": 5})),
    ("tied embeddings", lambda run: _edit(run, "gates.json", tied=False)),
    ("tokenizer", lambda run: _edit(run, "gates.json", tokenizer_fingerprint="f" * 64)),
    ("tokenizer", _other_corpus_tokenizer),
    ("end of document", lambda run: _edit(run, "gates.json", eod_in_loss=False)),
    ("loss mask", lambda run: _edit(run, "gates.json", loss_mask_share=0.9971)),
    ("documents", lambda run: _edit(run, "gates.json", documents_isolated=True)),
    ("step-0 loss", lambda run: _edit(run, "step0.json", hf_loss=4.4652)),
    ("step-0 loss", lambda run: _edit(run, "step0.json", hf_loss=float("nan"))),
    ("step-0 loss", lambda run: _edit(run, "step0.json", hf_loss=4.5, bound=1.0)),  # a bound cannot be widened
    ("data", _flip_bin),
    ("data", _prepare_again),
    ("export", lambda run: _edit(run, "export.json", max_abs_logits=0.02)),
    ("export", lambda run: _edit(run, "export.json", ok=False)),
]


@pytest.mark.parametrize(("name", "tamper"), TAMPERED, ids=[f"{i}-{t[0]}" for i, t in enumerate(TAMPERED)])
def test_each_item_fails_when_tampered_with(tmp_path: Path, name: str, tamper: Callable[[RunDir], None]) -> None:
    run = write_run(tmp_path, steps=4)
    tamper(run)
    states = _states(run)
    assert states[name] == "fail", states
    others = {item: state for item, state in states.items() if item != name and state != "pass"}
    assert others == ({"data": "fail"} if tamper is _other_corpus_tokenizer else {})
    result = make_passport(run.path)
    assert not result.ok() and result.exit_code(strict=True) == 1 and result.exit_code() == 0


def test_masked_eod_is_held_to_the_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4)
    run.config.write_text(run.config.read_text().replace("seq_length: 256,", "seq_length: 256, eod_mask_loss: true,"))
    assert _states(run)["end of document"] == "fail"
    _edit(run, "gates.json", eod_in_loss=False, loss_mask_share=0.9971)
    assert {_states(run)[item] for item in ("end of document", "loss mask")} == {"pass"}


def test_isolated_documents_are_held_to_the_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4)
    config = run.config.read_text().replace("seq_length: 256,", "seq_length: 256, isolate_documents: true,")
    run.config.write_text(config)
    states = _states(run)
    assert [name for name, state in states.items() if state == "fail"] == ["end of document", "documents"]
    _edit(run, "gates.json", eod_in_loss=False, loss_mask_share=0.9971, documents_isolated=True)
    assert set(_states(run).values()) == {"pass"}


@pytest.mark.parametrize("version", ["abc+changes", "unknown", ""])
def test_unknown_code_fails_only_under_strict(tmp_path: Path, version: str) -> None:
    run = write_run(tmp_path, steps=4)
    run.version.write_text(version)
    result = make_passport(run.path)
    assert {item.name for item in result.items if item.state != "pass"} == {"code version"}
    assert result.ok() and not result.ok(strict=True) and result.exit_code(strict=True) == 1


def test_data_that_is_gone_or_not_read_is_unknown(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4)
    _flip_bin(run)
    assert _states(run, quick=True)["data"] == "unknown"
    for folder in json.loads((run.path / "data.json").read_text()):
        (Path(folder) / "train.bin").unlink()
    assert _states(run)["data"] == "unknown"


def test_the_corpus_is_the_one_the_run_read_not_one_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative folder: by the absolute path that the run recorded, else beside runs/."""
    run = write_run(tmp_path, steps=4)
    rows = json.loads((run.path / "data.json").read_text())
    recorded = {Path(folder).name: {**row, "absolute_path": folder} for folder, row in rows.items()}
    elsewhere = tmp_path / "elsewhere"
    for folder in rows:
        (elsewhere / Path(folder).name).mkdir(parents=True)  # another corpus of that name
    monkeypatch.chdir(elsewhere)
    (run.path / "data.json").write_text(json.dumps(recorded))
    assert _states(run)["data"] == "pass"
    for name, folder in zip(recorded, rows, strict=True):
        Path(folder).rename(tmp_path / name)
    assert _states(run)["data"] == "pass"


def test_a_run_from_scratch_has_no_hf_items(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4)
    for file in ("base.json", "step0.json", "export.json"):
        (run.path / file).unlink()
    states = _states(run)
    assert states["step-0 loss"] == states["export"] == "not applicable"
    assert make_passport(run.path).ok(strict=True)


def test_the_released_model_has_its_number_of_parameters(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4)
    text = run.config.read_text()
    for old, new in (("4, hidden_size: 128", "24, hidden_size: 896"), ("352", "4864"), ("heads: 4", "heads: 14")):
        text = text.replace(old, new)
    run.config.write_text(text.replace("vocab_size: 4096", "vocab_size: 151936"))
    _edit(run, "gates.json", parameters=494_032_768, model={"num_layers": 24}, vocab_size=151936)
    assert _states(run)["architecture"] == "pass"
    assert "Qwen2.5-0.5B" in make_passport(run.path).items[1].expected
    run.config.write_text(run.config.read_text().replace("weights: true", "weights: false"))
    _edit(run, "gates.json", tied=False)
    assert _states(run)["tied embeddings"] == "fail"  # the released model is tied, whatever the recipe says


def test_nothing_in_a_broken_run_breaks_it(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=4)
    for path in run.path.glob("*.json"):
        path.write_text('{"parameters": "many", "tied": 3, "model": [], "manifest_fingerprints": [1], "bound": "x"}')
    run.config.write_text("model: [")
    result = make_passport(run.path)
    assert not result.ok(strict=True)
    with pytest.raises(UserError):
        make_passport("nowhere", root=tmp_path / "runs")


def test_it_is_shown_in_the_terminal(tmp_path: Path) -> None:
    from rich.console import Console

    run = write_run(tmp_path, steps=4)
    _edit(run, "gates.json", tied=False)
    result: Passport = make_passport(run.path)
    stream = io.StringIO()
    Console(file=stream, width=160).print(result.table())
    assert "tied embeddings" in stream.getvalue() and "fail" in stream.getvalue()
