"""The model card of an export: front matter for the hub, the run's tables, and text of the user's that stays."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import launch
from common.errors import UserError
from common.rundir import RunDir
from report.card import BEGIN, END, FILL_IN, write_card
from report.evaluation.comparison import decide, make_row
from report.evaluation.result import Evaluation
from report.front_matter import read_front_matter
from tests.report.test_report import write_run


def evaluation(base: str | None = "exports/base") -> Evaluation:
    scores = [0.1 * (i % 7) for i in range(40)]
    rows = decide([make_row("cloze_code", "acc", True, [one + 0.2 for one in scores], scores if base else None)])
    how = {"harness": "lm_eval 0.4.13", "dtype": "float32", "device": "cpu"}
    return Evaluation("runs/cpt-replay/checkpoints/step-400", base, 400, how, rows)


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete run, and the folder that its export.json names."""
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path)
    folder = Path("exports/cpt")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    evaluation().save(run.evaluation(400))
    return folder


def front_matter(folder: Path) -> dict[str, Any]:
    return read_front_matter((folder / "README.md").read_text(), folder)[0]


def test_a_card_says_what_was_trained_and_what_came_of_it(exported: Path) -> None:
    text = write_card(exported).read_text()
    front = front_matter(exported)
    assert front["library_name"] == "transformers" and "datasets" not in front
    assert front["license"] == front["language"] == FILL_IN and "continual-pretraining" in front["tags"]
    assert front["base_model"] == "exports/base" and front["base_model_relation"] == "finetune"
    for said in (
        "Recipe `qwen25_tiny_cpt`: finished, 400 steps.",
        "| code | new | 614K | 75.0% | 4.73 |",
        "| prose | replay | 205K | 25.0% | 0.34 |",
        "25.0% of the tokens, planned",
        "| code | 5.020 | 3.710 | −1.310 |",
        "| `cloze_code` | acc | 40 | 0.2875 | 0.4875 | +0.2000 | 0.0000 | better |",
        "| step-0 loss | pass |",
        "python launch.py --recipe qwen25_tiny_cpt --name cpt-replay",
    ):
        assert said in text, said


def test_an_older_checkpoint_is_described_as_it_was(exported: Path) -> None:
    """The run went on after the checkpoint that was exported."""
    run = RunDir.at(Path("runs/cpt-replay"))
    record = json.loads(run.export.read_text())
    run.export.write_text(json.dumps({**record, "checkpoint": "runs/cpt-replay/checkpoints/step-200"}))
    text = write_card(exported).read_text()
    assert "unfinished, step 200 of 400" in text and "at step 200;" in text
    assert "| code | new | 307K | 75.0% | 2.36 |" in text and "614K" not in text and "3.710" not in text
    assert "## Evaluation" not in text  # that of step 400
    older = dataclasses.replace(evaluation(str(Path("exports/base").absolute())), step=200)
    older.save(run.evaluation(200))
    text = write_card(exported).read_text()
    assert "Beside `base` on the same items" in text and str(Path.cwd()) not in text


def test_data_sets_are_those_of_the_hub(exported: Path) -> None:
    """The hub makes links of them; the names of domains are in the table."""
    run = RunDir.at(Path("runs/cpt-replay"))
    manifests = json.loads(run.data.read_text())
    paths = ["hf://datasets/HuggingFaceFW/fineweb-edu@0123abc/sample/a.parquet", "/data/own.jsonl"]
    for manifest in manifests.values():
        manifest["sources"] = [{"path": path, "bytes": 1, "sha256": "0"} for path in paths]
    run.data.write_text(json.dumps(manifests))
    write_card(exported)
    assert front_matter(exported)["datasets"] == ["HuggingFaceFW/fineweb-edu"]


def test_what_the_user_wrote_stays(exported: Path) -> None:
    path = write_card(exported)
    text = path.read_text().replace("What this model is for: fill in.", "For code in Python.") + "\nMore of mine.\n"
    path.write_text(text.replace("tags:\n", "tags:\n- mine\n").replace("# exports", "# exports"))
    (Path("runs/cpt-replay/command.txt")).write_text("/some/where/bin/python launch.py --recipe other\n")
    again = write_card(exported, front_matter={"license": "apache-2.0"}).read_text()
    assert "For code in Python." in again and again.endswith("More of mine.\n")
    assert front_matter(exported)["tags"][0] == "mine" and front_matter(exported)["license"] == "apache-2.0"
    assert again.count(BEGIN) == again.count(END) == 1
    assert "python launch.py --recipe other" in again and "/some/where" not in again
    assert write_card(exported).read_text() == again


def test_the_command_fills_the_gaps(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["card", str(exported), "--license", "mit", "--language", "en,zh", "--base-model", "Qwen/Qwen2.5-0.5B"]
    assert launch._run(words) == 0
    front = front_matter(exported)
    assert (front["license"], front["language"], front["base_model"]) == ("mit", ["en", "zh"], "Qwen/Qwen2.5-0.5B")
    assert yaml.safe_load((exported / "README.md").read_text().split("---")[1]) == front


def test_an_own_folder_is_no_hub_id_and_a_card_without_a_run(exported: Path) -> None:
    base = Path("runs/cpt-replay/base.json")
    base.write_text(json.dumps({"source": "models/qwen25-tiny"}))
    write_card(exported)
    assert front_matter(exported)["base_model"] == FILL_IN
    alone = Path("alone")
    alone.mkdir()
    (alone / "config.json").write_text("{}")
    evaluation(base=None).save(alone / "evaluation.json")
    text = write_card(alone).read_text()
    assert "not on the machine" in text and "| `cloze_code` | acc | 40 | 0.4875 |" in text
    with pytest.raises(UserError, match="is no exported model"):
        write_card(Path("nowhere"))
