"""The command with the real harness on small models: the same scores as its own, equal models, every bad input."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from report.evaluation import harness
from report.evaluation.evaluate import evaluate
from report.evaluation.request import EvaluateRequest
from report.evaluation.result import newest_evaluation, read_evaluation
from tests.report.test_local_tasks import DOCUMENTS, WORDS

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.skipif(not harness.is_installed(), reason="the lm-evaluation-harness is not installed"),
]


def request(model: str, against: str | None = None, **options: Any) -> EvaluateRequest:
    return EvaluateRequest(model=model, against=against, **{"text": ["text.jsonl"], "device": "cpu", **options})


def _as_pushed_to_a_run(exported: Path) -> None:
    """A run whose only checkpoint is the imported base, as after zero steps, and whose base is that model."""
    run = Path("runs/zero")
    shutil.copytree("imported", run / "checkpoints" / "step-0")
    (run / "spec.json").write_text(json.dumps({"recipe": "qwen25_tiny", "overrides": []}))
    (run / "base.json").write_text(json.dumps({"source": "base"}))
    (run / "export.json").write_text(json.dumps({"output": str(exported)}))


def _scored_by_the_harness_alone(tasks: Path) -> dict[str, Any]:
    """The harness's own aggregates on the same files, with a model that it loads itself."""
    from lm_eval import evaluate as harness_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = ["cloze_text", "next_line_text", "bits_text"]
    loaded = TaskManager(include_path=str(tasks), include_defaults=False).load(names)
    model = HFLM("base", dtype="float32", device="cpu", prefix_token_id=4095)
    found = harness_evaluate(model, loaded, limit=6, bootstrap_iters=0)
    assert found is not None
    return dict(found["results"])


def _bring_hellaswag(folder: Path) -> None:
    """The task's data as huggingface-cli downloads them: Parquet files, one per split."""
    import pyarrow
    from pyarrow import parquet

    item = {"activity_label": "Cooking", "ctx_a": "A person holds a pan.", "ctx_b": "they", "label": "0"}
    rows = [{**item, "ind": i, "endings": [f"{WORDS[i]} on the stove.", "fly.", "read.", "sleep."]} for i in range(8)]
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data" / f"{split}-00000-of-00001.parquet")


def _score_subjects() -> list[tuple[str, str, int]]:
    """A group of tasks, each with a configuration of one data set, in the layout of refs/convert/parquet."""
    import pyarrow
    from pyarrow import parquet

    definitions = Path("definitions")
    definitions.mkdir()
    data = Path("corpora/benchmarks/ceval/ceval-exam")
    for number, subject in enumerate(("law", "art")):
        rows = [{"question": f"{WORDS[i]}?", "choices": WORDS[:4], "answer": i % 4} for i in range(5 + 2 * number)]
        for split in ("dev", "val", "test"):
            (data / subject / split).mkdir(parents=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows), data / subject / split / "0000.parquet")
        task = {
            "task": f"subjects_{subject}",
            "dataset_path": "ceval/ceval-exam",
            "dataset_name": subject,
            "validation_split": "val",
            "fewshot_split": "dev",
            "output_type": "multiple_choice",
            "doc_to_text": "question",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (definitions / f"subjects_{subject}.yaml").write_text(json.dumps(task))
    group = {"group": "subjects", "task": ["subjects_law", "subjects_art"]}
    (definitions / "subjects.yaml").write_text(json.dumps(group))
    tasks = harness.load_tasks(["subjects"], definitions)
    options = harness.ScoreOptions("cpu", "float32", 256, 4, None)
    found = harness.score(harness.open_model(Path("base"), options), tasks, "subjects", options)
    return [("subjects", metric, len(scores)) for metric, scores in found.metrics.items()]


def _cut_off_at_the_model() -> tuple[list[str], int]:
    """An evaluation that ends in the second task of the model: what was scored, and how many tasks are stored."""
    real, order = harness.score, []
    opened = harness.open_model

    def open_model(path: Path, options: Any) -> Any:
        order.append(str(path))
        return opened(path, options)

    def score(model: Any, tasks: Any, name: str, options: Any) -> Any:
        order.append(name)
        if len(order) == 7:
            raise TimeoutError
        return real(model, tasks, name, options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "open_model", open_model)
        patch.setattr(harness, "score", score)
        with pytest.raises(TimeoutError):
            evaluate(request("worse", "base", limit=6))
    return order, len(list(Path("corpora/evaluation").glob("*/scores-*.json")))


def _models() -> dict[str, Any]:
    from safetensors.torch import load_file, save_file

    from convert.export_hf import export_hf
    from convert.import_hf import import_hf
    from tests.convert.test_convert import TIED, make_hf

    Path("text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    base = make_hf(Path("base"), **TIED, eos_token_id=4095, bos_token_id=4095)
    exported = export_hf(import_hf("base", Path("imported")), Path("exported"))
    _as_pushed_to_a_run(exported)
    shutil.copytree(base, "worse")
    weights = load_file("worse/model.safetensors")
    weights["model.norm.weight"] *= 10  # as sure of wrong words as of right ones
    save_file(weights, "worse/model.safetensors", {"format": "pt"})

    order, cut_off = _cut_off_at_the_model()
    same = evaluate(request("exported", "base", limit=6))
    with pytest.MonkeyPatch.context() as patch:  # the run deletes the checkpoint while it is read
        patch.setattr("report.evaluation.evaluate.check_undamaged", lambda _: shutil.rmtree("runs/zero/checkpoints"))
        run = evaluate(request("zero", limit=6))
    worse = evaluate(request("worse", "base", tasks="cloze"))
    _bring_hellaswag(Path("corpora/benchmarks/Rowan/hellaswag"))
    brought = evaluate(request("exported", "base", tasks="hellaswag"))
    from common.rundir import RunDir

    (tasks,) = (file.parent for file in Path("corpora/evaluation").glob("*/bits_text.yaml"))
    return {
        "order": order,
        "cut_off": cut_off,
        "same": same,
        "run": run,
        "worse": worse,
        "brought": brought,
        "files": [newest_evaluation(RunDir("zero")), read_evaluation(Path("exported/evaluation.json"))],
        "left": sorted(path.name for path in Path("runs/zero").iterdir()),
        "reference": _scored_by_the_harness_alone(tasks),
        "subjects": _score_subjects(),
        "errors": _errors(),
    }


def _errors() -> dict[str, str]:
    """Bad inputs, each with the error that it gives."""
    shutil.copytree("base", "no-eos")
    file = Path("no-eos/tokenizer.json")
    file.write_text(file.read_text().replace("<|endoftext|>", "<|other|>"))
    Path("no-eos/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    Path("no-eos/special_tokens_map.json").unlink()
    shutil.copytree("base", "other-tokenizer")
    file = Path("other-tokenizer/tokenizer.json")
    file.write_text(file.read_text().replace('"type": "NFC"', '"type": "NFKC"'))
    shutil.copytree("base", "small")
    from tests.convert.test_convert import TIED, make_hf

    make_hf(Path("small"), **TIED, vocab_size=512, eos_token_id=0, bos_token_id=0)
    (Path("elsewhere")).mkdir()
    bad = {
        "no end of document": request("no-eos", "none"),
        "two tokenizers": request("other-tokenizer", "base"),
        "tokenizer of a larger model": request("small", "none"),
        "no data": request("base", "none", tasks="piqa"),
        "unknown task": request("base", "none", tasks="helaswag"),
        "no model": request("nowhere", "none"),
        "no gpu": request("base", "none", device="cuda"),
        "nothing": request("base", "none", limit=0),
    }
    found = {}
    for name, one in bad.items():
        try:
            evaluate(one)
        except UserError as error:
            found[name] = error.explain()
    return found


def test_scores_differences_and_bad_inputs(forked: Callable[..., Any]) -> None:
    found = forked(_models)
    # the base comes first, and each task is stored: the next checkpoint need not score it again
    tasks = ["cloze_text", "next_line_text", "bits_text"]
    assert (found["order"], found["cut_off"]) == (["base", *tasks, "worse", *tasks[:2]], 4)
    # an export after zero steps, as a folder and as a run, scores as its base to the last bit
    for one in (found["same"], found["run"]):
        assert len(one.rows) == 5
        assert [(row.value, row.difference, row.verdict) for row in one.rows] == [
            (row.base, 0.0, "same") for row in one.rows
        ]
    assert (found["run"].step, found["run"].base) == (0, "base")
    assert found["files"] == [found["run"], found["brought"]] and found["left"] == [
        *("base.json", "evaluation", "export.json", "spec.json")
    ]
    # the values are those of the harness
    values = {(row.task, row.metric): row.value for row in found["same"].rows}
    reference = found["reference"]
    assert values["cloze_text", "acc"] == reference["cloze_text"]["acc,none"]
    assert math.exp(values["cloze_text", "nats"]) == pytest.approx(reference["cloze_text"]["perplexity,none"], rel=1e-5)
    assert values["next_line_text", "acc"] == reference["next_line_text"]["acc,none"]
    assert values["next_line_text", "acc_norm"] == reference["next_line_text"]["acc_norm,none"]
    bits = reference["bits_text"]["bits_per_byte,none"]
    assert values["bits_text", "bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    # what is wrong is seen where there are items enough
    assert [(row.metric, row.verdict) for row in found["worse"].rows][0] == ("nats", "worse")
    assert len(found["worse"].how["sha256"]) == 2
    assert [(row.metric, row.items, row.difference) for row in found["brought"].rows] == [
        ("acc", 8, 0.0),
        ("acc_norm", 8, 0.0),
    ]

    assert found["subjects"] == [("subjects", "acc", 12)]

    errors = found["errors"]
    assert "no token that ends a document" in errors["no end of document"]
    assert "different tokenizers" in errors["two tokenizers"]
    assert "a tokenizer that is not its own" in errors["tokenizer of a larger model"]
    missing = errors["no data"]
    assert "huggingface-cli download baber/piqa --repo-type dataset --local-dir corpora/benchmarks/baber/" in missing
    assert "did you mean hellaswag" in errors["unknown task"]
    assert "no Hugging Face model at nowhere" in errors["no model"]
    assert "there is no GPU" in errors["no gpu"]
    assert "--limit is too small" in errors["nothing"]


def test_without_the_harness_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "is_installed", lambda: False)
    with pytest.raises(UserError, match="pip install 'lm_eval==0.4.13' -c constraints.txt$"):
        evaluate(EvaluateRequest(model="nowhere"))
