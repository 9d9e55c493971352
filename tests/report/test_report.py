"""The report of complete, nearly empty and crashed runs: right numbers, self-contained, every text escaped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.rank_states import RankState
from common.run_status import FAILED, RunStatus
from common.rundir import RunDir
from common.spec import RunSpec
from report import report
from report.analysis import compute_changes, compute_tokens, find_spikes, percentile
from report.evaluation.comparison import decide, make_row
from report.evaluation.result import Evaluation
from report.figures import draw_figures
from report.passport import check_files
from report.read import read_run
from report.report import write_report
from watch.diagnose import explain_failure

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = "b2b3dbc15d3532ba38b3ea0cd5991a689cccc9a4663b56274592afdb0a7e7dd6"
SHAPE = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 352,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 4096,
}
PARAMETERS = 1_263_744  # of SHAPE, tied
CONFIG = """
data: {_target_: data.module.BlendDataModule, seq_length: 256, micro_batch_size: 8, global_batch_size: 8}
model:
  config: {num_layers: 4, hidden_size: 128, ffn_hidden_size: 352, num_attention_heads: 4, num_query_groups: 2,
    vocab_size: 4096, share_embeddings_and_output_weights: true}
optim:
  config: {optimizer: adam, lr: 0.0003, weight_decay: 0.1, adam_beta1: 0.9, adam_beta2: 0.95, clip_grad: 1.0}
  lr_scheduler: {_target_: recipes.build.optim.WarmupStableDecay, warmup_steps: 20, decay_steps: 80, min_lr: 3.0e-05}
trainer: {accelerator: gpu, max_steps: 400, devices: 1, num_nodes: 1, plugins: {precision: bf16-mixed}}
speed: {fp8: true, fp8_lm_head: false}
"""


def rows(steps: int, forgotten: float, domains: tuple[str, str], share: float) -> list[dict[str, Any]]:
    """A training of `steps` steps: the new domain falls by 1.31 nats, the replayed one rises by `forgotten`."""
    rng, out = random.Random(7), [_validated(0, 0.0, forgotten, domains)]
    for step in range(2, steps + 1, 2):
        part = step / steps
        out.append(
            {
                "step": step,
                "loss": 3.4 + 1.6 * math.exp(-6 * part) + rng.gauss(0, 0.06),
                "lr": 3e-4 * min(1, step / 20) * (1 if part < 0.8 else 1 - 4.5 * (part - 0.8)),
                "grad_norm": 0.6 + rng.random() * 0.3,
                "global_batch_size": 8,
                "step_seconds": 0.38 + rng.random() * 0.04 + (0.3 if step == 2 else 0),
                "tokens_per_second": 5200 + rng.gauss(0, 130),
                "unmasked_tokens": 2048 * step,
                "consumed_samples": 8 * step,
                "memory_gib": 11.25,
                "time": 1.8e9 + 0.4 * step,
                "consumed_tokens": {domains[0]: int(2048 * step * (1 - share)), domains[1]: int(2048 * step * share)},
            }
        )
        if step % 40 == 0:
            out.append(_validated(step, part, forgotten, domains))
    return out


def _validated(step: int, part: float, forgotten: float, domains: tuple[str, str]) -> dict[str, Any]:
    new = 5.02 - 1.31 * (1 - math.exp(-4 * part)) / (1 - math.exp(-4))
    old = 3.91 + forgotten * math.sqrt(part)
    split = {
        name: {
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) / 3.6,
            "tokens": 16_384,
            "documents": 31,
            "standard_error": 0.11,
            "change": loss - start,
            "change_standard_error": 0.01 if step else 0.0,
            "change_since": 0,
        }
        for name, loss, start in zip(domains, (new, old), (5.02, 3.91), strict=True)
    }
    return {"step": step, "time": 1.8e9 + 0.4 * step, "val_loss": (new + old) / 2, "validation": split}


def write_corpus(folder: Path) -> dict[str, Any]:
    """Six small files and the manifest that describes them."""
    folder.mkdir(parents=True)
    splits: dict[str, dict[str, Any]] = {}
    for split in ("train", "validation", "test"):
        splits[split] = {"documents": 3, "tokens": 100}
        for kind in ("bin", "idx"):
            content = f"{folder.name} {split} {kind}".encode()
            (folder / f"{split}.{kind}").write_bytes(content)
            splits[split][f"{kind}_sha256"] = hashlib.sha256(content).hexdigest()
    manifest = {"name": folder.name, "tokenizer": {"fingerprint": TOKENIZER}, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return manifest


def write_run(
    root: Path,
    name: str = "cpt-replay",
    forgotten: float = 0.42,
    share: float = 0.25,
    domains: tuple[str, str] = ("code", "prose"),
    steps: int = 400,
) -> RunDir:
    """A whole continual-pretraining run with its corpora, as the training process leaves it."""
    run = RunDir(name, root / "runs")
    (run.path / "logs" / "attempt-1").mkdir(parents=True)
    run.config.write_text(CONFIG)
    run.command.write_text(f"python launch.py --recipe qwen25_tiny_cpt --name {name}\n")
    run.version.write_text("4b1c7f0d9e2a" + "0" * 28 + "\n")
    run.env.write_text(json.dumps([{"key": "OMP_WAIT_POLICY", "value": "PASSIVE", "source": "cpu", "reason": "why"}]))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows(steps, forgotten, domains, share)))
    manifests = {}
    for domain in domains:
        folder = root / "corpora" / hashlib.md5(domain.encode()).hexdigest()[:8]
        manifests[str(folder)] = (
            json.loads((folder / "manifest.json").read_text()) if folder.exists() else write_corpus(folder)
        )
    records = {
        "spec.json": {"recipe": "qwen25_tiny_cpt", "name": name, "gates": True},
        "data.json": manifests,
        "blend.json": _blend(domains, share, list(manifests)),
        "gates.json": {
            "parameters": PARAMETERS,
            "tied": True,
            "model": SHAPE,
            "vocab_size": 4096,
            "tokenizer_fingerprint": TOKENIZER,
            "manifest_fingerprints": dict.fromkeys(manifests, TOKENIZER),
            "eod": 4095,
            "eod_in_loss": True,
            "loss_mask_share": 1.0,
        },
        "base.json": {"source": "exports/base", "checkpoint": "checkpoints/base", "fingerprint": "9f" * 32},
        "step0.json": {
            "megatron_loss": 4.4650012,
            "hf_loss": 4.4650031,
            "tokens": 16384,
            "dtype": "float32",
            "bound": 1e-5,
        },
        "export.json": {
            "checkpoint": f"{run.path}/checkpoints/step-400",
            "output": "exports/cpt",
            "max_abs_logits": 3.1e-6,
            "max_abs_parameters": 0.0,
            "bound": 1e-4,
            "dtype": "float32",
            "ok": True,
        },
    }
    for file, content in records.items():
        (run.path / file).write_text(json.dumps(content))
    return run


def _blend(domains: tuple[str, str], share: float, folders: list[str]) -> dict[str, Any]:
    total = 400 * 2048
    entries = [
        {
            "name": name,
            "role": role,
            "folder": folder,
            "weight": weight,
            "tokens_available": available,
            "tokens_planned": int(total * weight),
            "epochs_planned": total * weight / available,
            "bytes_per_token": 3.6,
        }
        for name, role, folder, weight, available in zip(
            domains, ("new", "replay"), folders, (1 - share, share), (130_000, 608_811), strict=True
        )
    ]
    return {"domains": entries, "replay_share": share, "total_tokens": total}


class Text(HTMLParser):
    """Visible text, tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {key for key, _ in attrs}
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "data", "action")]
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A whole run with its report, which takes seconds to draw."""
    run = write_run(tmp_path_factory.mktemp("complete"))
    scores = [0.1 * (i % 7) for i in range(40)]
    evaluated = decide([make_row("cloze_code", "acc", True, [one + 0.2 for one in scores], scores)])
    Evaluation("cpt-replay", "exports/base", 400, {}, evaluated).save(run.evaluation(400))
    run.forecast.write_text(json.dumps({"forecasts": [_forecast(False, 3.81), _forecast(True, 3.40)]}))
    assert write_report(run.path) == run.path / "report.html"
    return run


def _forecast(hindsight: bool, loss: float) -> dict[str, Any]:
    curve = [[step, 5.0 - (5.0 - loss) * (step - 80) / 320, 3.0, 6.0] for step in (80, 200, 400)]
    code = {"loss": loss, "low": loss - 0.2, "high": loss + 0.2, "earlier_runs": ["runs/a", "runs/b"], "curve": curve}
    moment = {"made": "", "step": 80, "num_steps": 400, "run_step": 400 if hindsight else 86, "hindsight": hindsight}
    return {**moment, "domains": {"code": code, "cut off": {"loss": 3.0}}}


def test_a_complete_run(complete: RunDir) -> None:
    run = complete
    seen = Text((run.path / "report.html").read_text())
    assert "code \u22121.31 ± 0.02 nats learned · prose +0.42 ± 0.02 nats forgotten" in seen.text
    assert "± is 2 standard errors over documents, of the differences of each document" in seen.text
    assert "on 16.4K tokens of 31 documents" in seen.text
    assert "5.020 \u2192 3.710 nats per token" in seen.text
    assert "finished, 400 steps" in seen.text
    assert "12 of 12 all passed" in seen.text
    assert "at step 400 beside exports/base on the same items. Better or worse: two-sided p" in seen.text
    assert re.search(r"cloze_code acc 40 0\.28[78] 0\.48[78] \+0\.2000 0\.0000 better", seen.text)
    forecast = "code step 80 of 400 step 86 2 earlier runs 3.810 3.610 to 4.010 3.710 +2.7% inside"
    assert forecast in seen.text and "step 400, in hindsight" in seen.text and "outside" in seen.text
    assert "Planned: 25.0% replay" in seen.text
    assert "code is read 4.7 times" in seen.text
    assert "prose is forgotten by 0.42 nats" in seen.text
    assert f"{PARAMETERS:,}" in seen.text
    assert "operands in FP8 gate and up embeddings" not in seen.text and "operands in FP8 gate and up" in seen.text
    assert "11.2 GiB reserved on the GPU" in seen.text
    for name in ("validation", "forecast", "loss", "lr", "replay", "throughput", "memory"):
        assert (run.path / "report" / f"{name}.png").stat().st_size > 3000, name


def test_the_page_is_self_contained(complete: RunDir) -> None:
    page = (complete.path / "report.html").read_text()
    seen = Text(page)
    assert not seen.tags & {"script", "link", "iframe", "object", "embed", "img"}
    assert all(link.startswith("#") for link in seen.links), seen.links
    assert "http" not in page and "@import" not in page
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {f"#{name}" for name in seen.ids}
    assert len(seen.ids) == len(set(seen.ids))


def test_a_phone_has_its_own_figures_and_every_cell_its_column(complete: RunDir) -> None:
    page = (complete.path / "report.html").read_text()
    for name in ("validation", "forecast", "loss", "replay"):
        assert all(f'<svg class="{screen}"' in page for screen in ("wide", "narrow"))
        assert page.count(f'aria-label="{name}"') == 2
    cells = re.findall(r"<td([^>]*)>", page.split("<h2>Configuration")[0])
    assert all("data-column=" in cell for cell in cells if "bar-cell" not in cell) and len(cells) > 30


@pytest.fixture
def fewer_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with names of domains and runs. A report takes seconds to draw; others of these tests draw it all."""

    def draw(*args: Any) -> dict[str, list[Any]]:
        return {name: versions for name, versions in draw_figures(*args).items() if name in ("validation", "replay")}

    monkeypatch.setattr(report, "draw_figures", draw)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the text: drawing takes most of the time of a report."""
    monkeypatch.setattr("report.report.draw_figures", lambda *_: {})


@pytest.mark.usefixtures("fewer_figures")
def test_names_are_escaped(tmp_path: Path) -> None:
    bad = "<script>alert('x')</script> & \" onload=\"alert(1) $a_b$ 散文"
    run = write_run(tmp_path, name="run & <b>", domains=("<i>code</i>", bad))
    run.command.write_text("python launch.py '</pre><script>1</script>'")
    other = write_run(tmp_path, name="other<u>", domains=("<i>code</i>", bad))
    seen = Text(write_report(run.path, against=[other.path]).read_text())
    assert not seen.tags & {"script", "b>", "i>", "u"} and "onload" not in seen.attributes
    assert bad in " ".join(seen.words) and "run & <b>" in seen.text and "</pre><script>1</script>" in seen.text


@pytest.mark.usefixtures("fewer_figures")
def test_runs_are_compared_and_a_failed_item_is_shown(tmp_path: Path) -> None:
    write_run(tmp_path, "without", forgotten=0.97, share=0.0)
    run = write_run(tmp_path, "with", forgotten=0.12, share=0.25)
    run.gates.write_text(json.dumps({**json.loads(run.gates.read_text()), "tied": False}))
    page = write_report("with", against=["without"], root=tmp_path / "runs").read_text()
    seen = Text(page)
    assert page.count('class="state fail"') == 1 and "11 of 12" in seen.text and "1 failed" in seen.text
    assert "prose +0.97 · 0% replay" in seen.text  # the label at the curve's end
    assert "prose +0.12 · 25% replay" in seen.text
    assert re.search(r"without the same 0% 400 \u22121.310 ± 0.020 \+0.970 ± 0.020", seen.text)


@pytest.mark.usefixtures("without_figures")
def test_a_run_of_another_base_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the record of its base, or by another loss before the first step; in the labels of the figures, too."""
    labels: list[str] = []

    def draw(_: Any, runs: list[tuple[str, Any]], *__: Any) -> dict[str, Any]:
        labels.extend(name for name, _ in runs)
        return {}

    monkeypatch.setattr("report.report.draw_figures", draw)
    run, other = write_run(tmp_path, "one"), write_run(tmp_path, "two")
    assert "another" not in Text(write_report(run.path, against=[other.path]).read_text()).text
    base = {"source": "exports/other", "checkpoint": "checkpoints/other", "fingerprint": "11" * 32}
    (other.path / "base.json").write_text(json.dumps(base))
    text = Text(write_report(run.path, against=[other.path]).read_text()).text
    assert "two began with another model: exports/other instead of exports/base." in text
    assert "two another: exports/other instead of exports/base" in text and labels[-1] == "two (another base)"
    (run.path / "base.json").unlink()
    (other.path / "base.json").unlink()
    other.metrics.write_text(other.metrics.read_text().replace('"loss": 5.02,', '"loss": 5.2,'))
    text = Text(write_report(run.path, against=[other.path]).read_text()).text
    assert "two began with another model: code began at 5.200 instead of 5.020 nats per token." in text


@pytest.mark.usefixtures("without_figures")
def test_learned_and_forgotten_are_said_beyond_two_standard_errors_only(tmp_path: Path) -> None:
    run = write_run(tmp_path, forgotten=0.014)
    text = Text(write_report(run.path).read_text()).text
    assert "prose +0.01 ± 0.02 nats no clear change" in text
    assert "prose: +0.01 ± 0.02 nats per token on 16,384 tokens of 31 documents is no clear change" in text
    assert {i.name: i.state for i in check_files(read_run(run)).items}["learned and forgotten"] == "pass"
    names = "tokens documents standard_error change change_standard_error change_since".split()  # noqa: SIM905
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in rows:
        for values in row.get("validation", {}).values():
            for name in names:
                del values[name]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = Text(write_report(run.path).read_text()).text  # a run of an earlier version
    assert "prose +0.01 nats forgotten" in text and "standard errors over documents" not in text
    assert {i.name: i.state for i in check_files(read_run(run)).items}["learned and forgotten"] == "unknown"


def test_an_empty_run(tmp_path: Path) -> None:
    run = RunDir("new", tmp_path)
    run.path.mkdir()
    text = Text(write_report(run.path).read_text()).text
    assert "No validation is recorded yet" in text
    assert "metrics.jsonl does not exist" in text and "config.yaml does not exist" in text
    assert not list((run.path / "report").iterdir())


@pytest.mark.usefixtures("fewer_figures")
def test_a_crashed_run(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    lines = run.metrics.read_text().splitlines()[:60]
    diverged = {"step": json.loads(lines[-1])["step"], "val_loss": math.nan, "validation": {"code": {"loss": math.nan}}}
    lines[-1] = json.dumps(diverged)
    lines[20] = re.sub(r'"loss": [\d.]+', '"loss": 9.5', lines[20])
    lines[50] = re.sub(r'"loss": [\d.]+', '"loss": NaN', lines[50])
    run.metrics.write_text("\n".join([*lines, lines[-1][:40]]))
    (run.path / "gates.json").write_text('{"parameters": 12')
    (run.path / "blend.json").write_text("[]")
    (run.path / "export.json").unlink()
    text = Text(write_report(run.path).read_text()).text
    row = json.loads(lines[50])
    assert f"Training loss is not a finite number at step {row['step']}" in text
    assert f"The loss spikes at step {json.loads(lines[20])['step']}" in text
    assert "line 61 is cut off" in text and "gates.json is not valid JSON" in text
    assert "unfinished, step" in text and "not exported yet" in text
    assert "code NaN nats not a number" in text


@pytest.mark.usefixtures("without_figures")
def test_a_learning_rate_that_is_too_high_is_one_line(tmp_path: Path) -> None:
    """Step, rate and advice, as the diagnosis of the launcher left them in status.json; no traceback."""
    run = RunDir("high", tmp_path)
    logs = run.attempt(1)
    logs.mkdir(parents=True)
    run.spec_file.write_text(RunSpec(recipe="qwen25_tiny", name="high", overrides=("optim.config.lr=1e6",)).to_json())
    error = (ROOT / "tests" / "watch" / "logs" / "diverged.log").read_text().strip()
    RankState(rank=0, state=FAILED, exit_code=1, error=error, host="node-a").write(logs)
    status = RunStatus(phase=FAILED, executor="direct", step=1, max_steps=400)
    status.write(run.status)
    dataclasses.replace(status, ending=explain_failure(run, 1)).write(run.status)
    text = Text(write_report(run.path).read_text()).text
    line = text[text.index("This run failed at step 1 of 400") :]
    assert "nan in step 2 at a learning rate of" in line and "optim.config.lr=0.0001" in line
    assert "Traceback" not in text


def test_later_rows_win_on_resume(tmp_path: Path) -> None:
    run = RunDir("resumed", tmp_path)
    run.path.mkdir()
    first = [{"step": s, "loss": 9.0} for s in (10, 20, 30, 40)]
    validated = [{"step": s, "val_loss": v} for s, v in ((0, 5.0), (20, 4.0), (40, 1.0))]
    second = [{"step": s, "loss": 3.0} for s in (30,)]
    split = {"step": 20, "validation": {"a": {"loss": 4.5}}}
    written = [validated[0], *first[:2], validated[1], split, *first[2:], validated[2], *second]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in written))
    files = read_run(run)
    assert [(row["step"], row["loss"]) for row in files.train] == [(10, 9.0), (20, 9.0), (30, 3.0)]
    assert [row["step"] for row in files.validation] == [0, 20]  # step 40 belongs to the attempt that was abandoned
    assert files.validation[1]["val_loss"] == 4.0 and files.validation[1]["validation"] == split["validation"]


def test_numbers_of_a_run(tmp_path: Path) -> None:
    files = read_run(write_run(tmp_path))
    code, prose = compute_changes(files)
    assert (code.verdict, prose.verdict, code.role, prose.role) == ("learned", "forgotten", "new", "replay")
    assert prose.curve[0] == (0, 0.0) and prose.curve[-1][0] == 400 and prose.curve[-1][1] == pytest.approx(0.42)
    row = compute_tokens(files)[1]
    assert row.planned_share == pytest.approx(0.25) and row.consumed_share == pytest.approx(0.25)
    assert row.consumed_epochs == pytest.approx(400 * 2048 * 0.25 / 608_811)
    assert find_spikes(files) == []
    assert percentile([float(v) for v in range(1, 101)], 0.99) == 99.0 and percentile([], 0.5) is None


def test_an_unknown_run_offers_the_nearest(tmp_path: Path) -> None:
    write_run(tmp_path, "qwen25_tiny_cpt")
    with pytest.raises(UserError) as error:
        write_report("qwen25_tiny_ctp", root=tmp_path / "runs")
    assert "qwen25_tiny_cpt" in error.value.do and error.value.found and error.value.expected


def test_nothing_heavy_is_imported() -> None:
    check = (
        "import sys, report.report, report.passport;"
        "print([m for m in ('torch', 'nemo', 'nemo_run', 'transformers', 'lightning', 'matplotlib', 'pydantic')"
        " if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
