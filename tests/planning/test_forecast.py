"""`launch.py forecast`: right on curves that follow the law, blind to what came later, kept once; light."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.rundir import RunDir
from common.spec import RunSpec
from planning.forecast import Forecast, keep_forecast, make_forecast, read_forecasts
from planning.forecast_page import format_forecast, show_forecast
from planning.forecast_request import ForecastRequest
from recipes.resolve import resolve
from report.forecast import forecast_rows
from report.read import read_run

STEPS, EVERY = 400, 10


def _loss(spec: RunSpec, step: int, level: float) -> float:
    """A curve that no candidate shape has exactly: power law of the sum of learning rates, minus its fall."""
    schedule = resolve(spec).plan.learning_rate()
    area = sum(schedule.lr(s) for s in range(step)) / 2e-3
    fallen = 1 - schedule.lr(max(0, step - 1)) / 2e-3 if step > schedule.warmup_steps else 0.0
    return float(level + 2.2 * (1 + area / 90) ** -0.7 - 0.2 * fallen)


def write_run(
    root: Path,
    name: str,
    profile: str,
    level: float,
    until: int = STEPS,
    every: int = EVERY,
    start: bool = True,
    more_words: tuple[str, ...] = (),
) -> RunDir:
    """A run of qwen25_tiny that has trained `until` steps."""
    run = RunDir(name, root)
    run.path.mkdir(parents=True)
    words = ("optim.config.lr=2e-3", f"trainer.val_check_interval={every}", *more_words)
    spec = RunSpec(recipe="qwen25_tiny", profile=profile, runs=str(root), name=name, overrides=words)
    run.spec_file.write_text(spec.to_json())
    wiggle = sum(map(ord, name)) % 7
    rows: list[dict[str, Any]] = []
    for step in range(0 if start else every, until + 1, every):
        loss = _loss(spec, step, level) + 0.004 * math.sin(step / 17 + wiggle)
        rows.append({"step": step, "val_loss": loss, "validation": {"prose": {"loss": loss}}})
        if step:
            rows.append({"step": step, "loss": loss, "lr": resolve(spec).plan.learning_rate().lr(step - 1)})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = {"phase": "done" if until == STEPS else "training", "attempt": 1, "step": until, "max_steps": STEPS}
    more = {"world_size": 1, "host": "a", "pid": 1, "started": 0.0, "updated": 0.0, "ranks": []}
    run.status.write_text(json.dumps({**more, **status}))
    run.attempt(1).mkdir(parents=True)
    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished runs, and one of another schedule that is at its quarter."""
    root = tmp_path_factory.mktemp("forecast") / "runs"
    for name, profile, level in (("a", "strong", 4.9), ("b", "wsd", 5.05), ("c", "strong", 4.8)):
        write_run(root, name, profile, level)
    write_run(root, "now", "polish", 5.0, until=100)
    return root


def _forecast(root: Path, run: str, **options: Any) -> Forecast:
    return make_forecast(ForecastRequest(run=run, runs=str(root), **options))[1]


def test_a_quarter_of_the_run_and_earlier_runs_tell_the_end(root: Path) -> None:
    found = _forecast(root, "now")
    one = found.domains["prose"]
    outcome = _loss(RunDir("now", root).spec(), STEPS, 5.0)
    assert one.loss == pytest.approx(outcome, rel=0.01)
    assert one.low < outcome < one.high < one.now
    assert sorted(Path(name).name for name in one.earlier_runs) == ["a", "b", "c"]
    assert (found.step, found.num_steps, found.run_step, found.hindsight) == (100, STEPS, 100, False)
    assert one.curve[0][0] == 100 and one.curve[-1][:2] == (STEPS, one.loss)


def test_alone_the_interval_is_wider_and_holds_the_outcome(root: Path) -> None:
    one = _forecast(root, "now", alone=True).domains["prose"]
    assert not one.earlier_runs and one.earlier_error is None
    assert one.low < _loss(RunDir("now", root).spec(), STEPS, 5.0) < one.high
    assert one.high - one.low > 2 * ((with_runs := _forecast(root, "now").domains["prose"]).high - with_runs.low)


def test_a_domain_that_rises_is_said_to_be_uncertain_alone(root: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(root, runs)
    rows = [json.loads(line) for line in (runs / "now" / "metrics.jsonl").read_text().splitlines()]
    rows[0]["validation"]["prose"]["loss"] = 2.0  # the first row is the base's
    (runs / "now" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ["prose has risen" in note for note in _forecast(runs, "now", alone=True).notes] == [True]
    assert _forecast(runs, "now").notes == () == _forecast(root, "now", alone=True).notes


def test_a_share_that_moves_by_itself_is_said_and_makes_another_kind(root: Path, tmp_path: Path) -> None:
    blend = tmp_path / "blend.yaml"
    stages = "stages: [{until: decay_start, weights: {a: 1}}, {weights: {b: 1}}]"
    blend.write_text(f"domains: [{{name: a, folder: a, role: new}}, {{name: b, folder: b, role: new}}]\n{stages}\n")
    words = ("forgetting_budget={'prose': 0.1}", f"data.blend={blend}")
    run = write_run(root, "budget", "polish", 5.0, until=100, more_words=words)
    try:
        found = _forecast(root, "budget")
    finally:
        shutil.rmtree(run.path)
    assert [note.partition(",")[0] for note in found.notes] == [
        "the blend changes on the way",
        "the replay share follows a forgetting budget",
    ]
    assert not found.domains["prose"].earlier_runs


def test_a_step_counts_when_its_validation_is_recorded(tmp_path: Path) -> None:
    """A step's loss and learning rate are written before its validation, which takes longer."""
    run = write_run(tmp_path / "runs", "training", "polish", 5.0, until=100)
    rows = run.metrics.read_text().splitlines()
    last = next(row for row in rows if json.loads(row)["step"] == 100 and "validation" in row)
    run.metrics.write_text("".join(row + "\n" for row in rows if row != last))
    with pytest.raises(UserError, match="not validated at step 100 yet") as refused:
        _forecast(tmp_path / "runs", "training", at=100)
    assert refused.value.found == "the newest one, at step 90"
    assert _forecast(tmp_path / "runs", "training", at=95).step == 95
    run.metrics.write_text("".join(row + "\n" for row in rows))
    assert _forecast(tmp_path / "runs", "training", at=100).step == 100


def test_runs_of_other_data_teach_nothing(root: Path) -> None:
    """Isolated documents, a corpus that was prepared again, or shares that were edited, in files of the same names."""

    def earlier(share: float, content: str, *words: str) -> tuple[str, ...]:
        run = write_run(root, "other", "polish", 5.0, until=100, more_words=words)
        for one in (run, *(RunDir(name, root) for name in "abc")):
            mine = one.path == run.path
            stage = {"replay_share": share if mine else 0.1, "within": {"prose": 1.0}}
            one.blend.write_text(json.dumps({"domains": [{"name": "prose", "role": "new"}], "stages": [stage]}))
            splits = {"train": {"bin_sha256": content if mine else "x"}}
            one.data.write_text(json.dumps({"corpora/prose": {"splits": splits}}))
        try:
            return _forecast(root, "other").domains["prose"].earlier_runs
        finally:
            shutil.rmtree(run.path)
            for name in "abc":
                RunDir(name, root).blend.unlink()
                RunDir(name, root).data.unlink()

    assert len(earlier(0.1, "x")) == 3
    assert not earlier(0.2, "x") and not earlier(0.1, "y")
    assert not earlier(0.1, "x", "data.isolate_documents=True")


def test_what_was_measured_later_changes_nothing(root: Path) -> None:
    before = _forecast(root, "a", from_=0.25)
    assert before.hindsight and before.run_step == STEPS
    run = RunDir("a", root)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    try:
        for row in rows:
            if row["step"] > 100 and "validation" in row:
                row["validation"]["prose"]["loss"] += 3.0
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        after = _forecast(root, "a", from_=0.25)
    finally:
        for row in rows:
            if row["step"] > 100 and "validation" in row:
                row["validation"]["prose"]["loss"] -= 3.0
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert after.domains == before.domains
    assert str(run.path) not in after.domains["prose"].earlier_runs


def test_a_resume_with_another_learning_rate_counts_as_it_was_logged(root: Path) -> None:
    run = write_run(root.parent / "other", "resumed", "strong", 5.0, until=200)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in lines:
        if "lr" in row:
            row["lr"] = 2e-3  # it was constant so far; the schedule of now says otherwise
    as_scheduled = _forecast(run.path.parent, "resumed", alone=True).domains["prose"].loss
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    assert abs(_forecast(run.path.parent, "resumed", alone=True).domains["prose"].loss - as_scheduled) > 0.01


def test_a_forecast_is_kept_and_shown_beside_its_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "runs", "kept", "wsd", 5.0, until=200)
    request = ForecastRequest(run="kept", runs=str(run.path.parent))
    show_forecast(request)
    assert "when nothing later was measured (the run was at step 200)" in " ".join(capsys.readouterr().out.split())
    first = read_forecasts(run)
    assert not keep_forecast(run, make_forecast(request)[1]) and read_forecasts(run) == first
    rest = write_run(tmp_path / "whole", "kept", "wsd", 5.0)
    run.metrics.write_text(rest.metrics.read_text())
    show_forecast(ForecastRequest(run="kept", runs=str(run.path.parent), at=200))
    text = " ".join(capsys.readouterr().out.split())
    assert "in hindsight: the run was at step 400" in text and "outcome: " in text
    assert read_forecasts(run)[0] == first[0] and len(read_forecasts(run)) == 2
    rows = forecast_rows(read_run(run))
    outcome = _loss(run.spec(), STEPS, 5.0)
    assert [row.hindsight for row in rows] == [False, True]
    assert rows[0].outcome == pytest.approx(outcome, abs=0.005)
    assert rows[0].error_percent == pytest.approx(100 * (rows[0].loss / outcome - 1), abs=0.2)
    run.forecast.write_text('{"forecasts": [{"domains": {"prose": {"loss": "x"}}}, 3]}')
    assert forecast_rows(read_run(run)) == []


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("a", {}, "is finished"),
        ("now", {"at": 300}, "has not come so far"),
        ("now", {"at": 400}, "not inside the run"),
        ("now", {"domain": "pose"}, "unknown domain 'pose'"),
        ("now", {"at": 30, "alone": True}, "too seldom"),
        ("now", {"like": ["now"]}, "from itself"),
        ("nothing", {}, "no run 'nothing'|unknown run 'nothing'"),
    ],
)
def test_errors(root: Path, name: str, options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        _forecast(root, name, **options)


def test_errors_of_the_records(tmp_path: Path) -> None:
    run = write_run(tmp_path, "late", "strong", 5.0, until=200, start=False)
    with pytest.raises(UserError, match="not validated at step 0"):
        _forecast(tmp_path, "late")
    run.metrics.write_text("")
    with pytest.raises(UserError, match="no validation yet"):
        _forecast(tmp_path, "late")
    run.spec_file.write_text(run.spec_file.read_text().replace("qwen25_tiny", "qwen25_gone"))
    with pytest.raises(UserError, match="learning rate of the rest"):
        _forecast(tmp_path, "late")


@pytest.mark.parametrize(
    "options", [{"from_": 0.2, "at": 3}, {"from_": 1.5}, {"from_": math.nan}, {"alone": True, "like": ["a"]}]
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        ForecastRequest(run="a", **options)


def test_lines_fit_a_terminal(root: Path) -> None:
    lines = list(format_forecast("runs/now", _forecast(root, "now"), {"prose": 5.0}))
    assert max(map(len, lines)) <= 100
    assert any("outcome: 5.000" in line for line in lines)
