"""`launch.py plan`: for every recipe, without NeMo; what it says of tokens, memory, time and refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common import machine_facts
from common.errors import UserError
from common.rundir import RunDir
from planning import calibrate
from planning.command import show_plan
from planning.cost import count_validations
from planning.figures import nearest_rate
from planning.hardware import Hardware, host_name
from planning.json_row import to_row
from planning.page import format_plan
from planning.plan import RunPlan, make_plan
from planning.request import PlanRequest
from recipes import memory, registry
from recipes.resolve import resolve
from recipes.stages import resolve_plan_stages

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_facts, "query_gpus", lambda: machine_facts.Gpus())
    monkeypatch.chdir(tmp_path)


def _plan(recipe: str, *words: str, **options: Any) -> RunPlan:
    return make_plan(PlanRequest(recipe=recipe, overrides=list(words), **options))


@pytest.mark.parametrize("name", registry.recipes())
def test_every_recipe_has_a_plan_without_data_and_gpu(name: str) -> None:
    found = _plan(name)
    page, row = format_plan(found), to_row(found)
    assert max(map(len, page.splitlines())) <= 100
    parts = row["parameters"]
    assert parts["total"] == sum(value for part, value in parts.items() if part != "total")
    assert row["time"]["total_seconds"] > row["time"]["training_seconds"] > 0
    assert row["fits"] in (True, None) and not row["problems"]
    assert sum(domain["tokens"] for domain in row["domains"]) == pytest.approx(row["tokens"], abs=2)
    assert "is not a prepared corpus" in page and "REFUSED" not in page
    json.dumps(row)


def test_it_takes_neither_torch_nor_nemo() -> None:
    code = (
        "import sys, launch; code = launch._run(['plan', 'qwen25_500m_cpt', '--json']);"
        "heavy = ('torch', 'nemo', 'nemo_run', 'transformers', 'lightning', 'matplotlib', 'numpy');"
        "print([m for m in heavy if m in sys.modules], code, file=sys.stderr)"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stderr.strip() == "[] 0"
    assert json.loads(out.stdout)["parameters"]["total"] == 494_032_768


def test_tokens_and_epochs_by_domain(sample: Path) -> None:
    domains = [
        {"name": "code", "folder": str(sample / "code"), "role": "new"},
        {"name": "prose", "folder": str(sample / "prose"), "role": "watch"},
    ]
    Path("blend.json").write_text(json.dumps({"domains": domains}))
    found = _plan("qwen25_tiny_cpt", "data.blend=blend.json", "trainer.max_steps=8000")
    code, prose = found.domains
    assert (code.tokens, prose.tokens, found.data_problem) == (8000 * 1024, 0, "")
    assert code.epochs is not None and code.epochs > 4
    page = format_plan(found)
    assert "prose (watch): validated, never trained on" in page
    text = " ".join(page.split())
    assert "code is read" in text and "arXiv 2305.16264" in text  # more than four epochs
    assert "nothing is replayed, and the new text has only" in text and "arXiv 2603.04964" in text


def test_the_base_that_was_trained_for_long_is_warned_of() -> None:
    text = " ".join(format_plan(_plan("qwen25_500m_cpt")).split())
    assert "18T tokens, 36,435 per parameter" in text and "arXiv 2503.19206" in text
    assert "warning" not in format_plan(_plan("qwen25_500m"))


def test_a_run_that_cannot_fit_is_refused_with_the_micro_batch_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    request = PlanRequest(recipe="qwen25_500m", overrides=["data.micro_batch_size=16"], gpu_memory_gib=24)
    assert show_plan(request) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "does NOT fit" in text
    assert "REFUSED the run does not fit into the GPU's memory" in text
    assert "data.micro_batch_size=4, the largest that fits" in text
    found = _plan("qwen25_500m", "data.micro_batch_size=4", gpu_memory_gib=24)
    assert found.fits and not found.problems and found.most_micro_batch == 4
    assert not _plan("qwen25_500m", "data.micro_batch_size=8", gpu_memory_gib=24).fits
    assert "not estimated" in format_plan(found)  # nothing is known of the speed of such a GPU


@pytest.mark.parametrize(
    ("gpu", "words", "refused"),
    [
        ("A100", ["speed.fp8=True"], True),
        ("H100", ["speed.fp8=True"], False),
        ("H100", ["speed.fp8=True", "trainer.strategy.tensor_model_parallel_size=2", "trainer.devices=2"], True),
        (None, ["speed.fp8=True"], False),  # on a GPU that is not known
    ],
)
def test_fp8_is_refused_where_it_cannot_be_used(gpu: str | None, words: list[str], refused: bool) -> None:
    found = _plan("qwen25_500m", *words, gpu=gpu)
    assert ["speed.fp8 cannot be used" in str(one.problem) for one in found.problems] == [True] * refused


@pytest.mark.parametrize("file", ["no/such/folder/lr.png", "lr.foo", "folder.png"])
def test_a_picture_that_cannot_be_written_is_refused(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    with pytest.raises(UserError, match="--picture cannot be written"):
        show_plan(PlanRequest(recipe="qwen25_tiny", picture=Path(file)))


def test_time_is_scaled_from_the_docs_and_says_how() -> None:
    h100, a100 = _plan("qwen25_500m", gpu="H100").cost, _plan("qwen25_500m", gpu="A100").cost
    assert h100.tokens_per_second == 132387 and h100.source.startswith(
        "from docs' table: docs/measurements/one-gpu-throughput.md"
    )
    assert a100.tokens_per_second == pytest.approx(132387 * 312 / 989)
    assert "x 0.315 (matrix rate, 312 of 989 TFLOP/s)" in a100.source and "scaled" in a100.source
    dual = _plan("qwen25_500m_dual", gpu="H100").cost
    assert dual.tokens_per_second == pytest.approx(132387 * 1.98)
    assert h100.energy_kwh == pytest.approx(0.7 * (h100.total_seconds or 0) / 3600)
    assert h100.power_source == "at most: the power limit of its data sheet"


def test_several_nodes_name_no_executor() -> None:
    assert "several nodes need --executor" in format_plan(_plan("qwen25_500m_multinode"))


def test_options_that_contradict_each_other() -> None:
    both: dict[str, Any] = {"gpu": "H100", "gpu_memory_gib": 24.0}
    nothing: dict[str, Any] = {"gpu_memory_gib": 0.0}
    elsewhere: dict[str, Any] = {"gpu": "H100", "calibrate": True}
    for options in (both, nothing, elsewhere):
        with pytest.raises(UserError):
            PlanRequest(recipe="qwen25_500m", **options)
    with pytest.raises(UserError, match="measures this machine"):
        _plan("qwen25_500m", calibrate=True)  # there is no GPU here


def _write_run(name: str, recipe: str, rates: list[float], gpu: str = "", power: float = 0.0) -> RunDir:
    """A finished run of `recipe` with these rates."""
    run = RunDir(name, Path("runs"))
    run.path.mkdir(parents=True)
    run.spec_file.write_text(resolve(PlanRequest(recipe=recipe).spec()).spec.to_json())
    rows = [{"step": i, "loss": 3.0, "tokens_per_second": r, "memory_gib": 1.5} for i, r in enumerate(rates, 1)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample: dict[str, Any] = {"time": 1.0, "host": host_name(), "attempt": 1}
    if gpu:
        sample["gpus"] = [{"index": 0, "name": gpu, "utilization_percent": 99, "power_w": power}]
    run.system_samples().write_text(json.dumps(sample) + "\n")
    status = {"phase": "done", "attempt": 1, "world_size": 1, "started": 1.0, "updated": 2.0}
    run.status.write_text(json.dumps(status))
    return run


def test_an_earlier_run_of_this_kind_is_the_better_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of its settled steps; another shape, another micro batch or another card does not count."""
    _write_run("mine", "qwen25_tiny", [1.0, 1.0, 1.0, 5000.0, 5200.0, 9000.0])
    cost = _plan("qwen25_tiny").cost
    assert (cost.tokens_per_second, cost.source) == (5200.0, "measured on this machine: runs/mine")
    assert _plan("qwen25_tiny", "data.micro_batch_size=2").cost.tokens_per_second == 9692
    gib = 2**30
    card = machine_facts.Gpu(0, "NVIDIA H100 80GB HBM3", 80 * gib, 80 * gib, "0", 0)
    monkeypatch.setattr(machine_facts, "query_gpus", lambda: machine_facts.Gpus((card,), (card,)))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    run = _write_run("gpu", "qwen25_500m", [9.0, 9.0, 9.0, 140e3], card.name, 612.0)
    spec = json.loads(run.spec_file.read_text())
    run.spec_file.write_text(json.dumps({**spec, "overrides": ["data.micro_batch_size=16"]}))
    cost = _plan("qwen25_500m").cost
    assert (cost.tokens_per_second, cost.power_w) == (140e3, 612.0)
    assert cost.power_source == "measured on this GPU: runs/gpu"
    assert _plan("qwen25_500m", gpu="H200").cost.tokens_per_second == 145253


def test_calibration_is_kept_for_this_machine_and_kind_of_run() -> None:
    resolved = resolve(PlanRequest(recipe="qwen25_tiny").spec())
    here = Hardware(None, "cpu", is_here=True)
    found = calibrate.Calibration(0.1, 0.2, 8.0, 0.5, 0.3, 1.0, 1.2, None, "runs/calibrate-qwen25_tiny", "2026-01-01")
    assert calibrate.read_calibration(resolved, here) is None
    calibrate._keep(resolved, here, found)
    assert calibrate.read_calibration(resolved, here) == found
    assert calibrate.read_calibration(resolved, Hardware(None, "cpu", is_here=False)) is None
    cost = _plan("qwen25_tiny").cost
    assert cost.total_seconds == pytest.approx(400 * 0.1 + 8.0 + 5 * 0.5 + 1 * 0.3 + 1.0)
    assert "measured on this machine: 20 steps in runs/calibrate-qwen25_tiny" in cost.source
    longer = _plan("qwen25_tiny", "trainer.max_steps=1000").cost
    assert longer.step_seconds == 0.1  # the length of a run does not change its steps
    assert _plan("qwen25_tiny", "data.micro_batch_size=2").cost.step_seconds != 0.1


def test_a_calibration_holds_for_the_software_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel library that was installed since, another version of one, or other code of this project."""
    from importlib import metadata

    resolved = resolve(PlanRequest(recipe="qwen25_tiny").spec())
    here = Hardware(None, "cpu", is_here=True)
    found = calibrate.Calibration(0.1, 0.2, 8.0, 0.5, 0.3, 1.0, 1.2, None, "runs/calibrate-qwen25_tiny", "2026-01-01")
    calibrate._keep(resolved, here, found)
    assert calibrate.read_calibration(resolved, Hardware(None, "cpu", is_here=True, path="quack")) is None
    for name in ("torch", "transformer_engine", "quack-kernels"):
        with monkeypatch.context() as patch:
            real = metadata.version
            patch.setattr(metadata, "version", lambda one, name=name, real=real: "99" if one == name else real(one))
            assert calibrate.read_calibration(resolved, here) is None, name
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "code_version", lambda: "another commit")
        assert calibrate.read_calibration(resolved, here) is None
    assert calibrate.read_calibration(resolved, here) == found


def test_what_20_steps_say(tmp_path: Path) -> None:
    """A trimmed mean of the steps; start, validations and checkpoints apart; a step that stalled does not count.

    The first validation also builds its data sets: what it takes longer belongs to the start.
    """
    run = RunDir("c", tmp_path)
    run.path.mkdir()
    rows: list[dict[str, Any]] = [{"step": 0, "time": 1010.0, "seconds": 4.0, "validation": {}}]
    for step in range(1, 21):
        seconds = {1: 2.0, 7: 5.0, 11: 0.4}.get(step, 0.1)
        rows.append({"step": step, "loss": 1.0, "step_seconds": seconds, "time": 1010.0 + step, "memory_gib": 0.9})
    rows.append({"step": 20, "time": 1030.0, "seconds": 1.0, "validation": {}})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = calibrate.measure(run, started=1000.0, ended=1031.5)
    assert found.step_seconds == pytest.approx(0.1) and found.validation_seconds == 1.0
    assert found.start_seconds == pytest.approx(30.0 - (2.0 + 5.0 + 0.4 + 1.7) - (4.0 + 1.0) + 1.9 + 3.0)
    assert found.stall_seconds == pytest.approx(0.3) and found.save_seconds == 1.5
    assert found.memory_gib == 0.9 and found.power_w is None

    file = run.checkpoints / f"step-{calibrate.SAVE_AT}" / "weights"
    file.parent.mkdir(parents=True)
    file.touch()
    os.utime(file, (1031.0, 1031.0))  # the second save has waited for it, 1 s after the last row
    waited = calibrate.measure(run, started=1000.0, ended=1031.5)
    assert waited == dataclasses.replace(found, save_seconds=0.5)


def test_validations_of_a_run() -> None:
    plan = registry.resolve("qwen25_tiny").plan
    assert count_validations(plan) == 5  # steps 0, 100, 200, 300, 400
    assert count_validations(plan.changed(max_steps=401)) == 6
    assert count_validations(plan.replace("trainer.limit_val_batches", 0)) == 0


def test_the_memory_of_every_layout_is_shown() -> None:
    row, plan = to_row(_plan("qwen25_500m_multinode")), registry.resolve("qwen25_500m_multinode").plan
    assert row["memory_gib"]["total"] == pytest.approx(memory.estimate(plan).gpu_gib)


def test_a_blend_with_stages_is_calibrated_on_its_first(sample: Path) -> None:
    """Stages that end beyond the 20 steps are no error there; nothing is evaluated in them."""
    roles = {"code": "new", "prose": "replay"}
    domains = [{"name": name, "folder": str(sample / name), "role": role} for name, role in roles.items()]
    stages = [{"until": "500M", "replay_share": 0.0}, {"until": "decay_start"}, {}]
    Path("blend.json").write_text(json.dumps({"domains": domains, "replay_share": 0.5, "stages": stages}))
    words = ["data.blend=blend.json", "trainer.max_steps=1000000", "evaluate.every_n_steps=5"]
    words += ["log.ckpt.every_n_train_steps=5", "data.replay_share=0.25"]
    words += [
        f"optim.lr_scheduler.{one}" for one in ("kind=wsd", "decay_end=None", "decay_steps=9", "fork_step=900000")
    ]
    resolved = resolve(PlanRequest(recipe="qwen25_tiny_cpt", overrides=words).spec())
    assert len(resolve_plan_stages(resolved.plan).stages) == 3
    short = resolve(calibrate.short_spec(resolved, "calibrate", Path("first.blend.json"))).plan
    found = resolve_plan_stages(short)
    assert (short.max_steps, short.evaluate_every_n_steps, found.has_stages) == (calibrate.STEPS, None, False)
    assert found.stages[0].tokens == {"code": 20 * short.tokens_per_step}
    assert list(found.folders) == ["code", "prose"]  # all are validated


def test_a_path_that_was_never_measured_says_what_was() -> None:
    with pytest.raises(UserError) as caught:
        nearest_rate(registry.resolve("qwen25_500m").plan, "none", None)
    assert "fast" in caught.value.found and "--calibrate" in caught.value.do
