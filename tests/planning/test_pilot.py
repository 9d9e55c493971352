"""`launch.py pilot`: what it trains, what it recommends, and that a second start repeats nothing; light."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from common import machine_facts
from common.errors import ProjectError, UserError
from common.rundir import RunDir
from launcher.earlier_runs import highest_rate
from planning import pilot
from planning.pilot_design import LEAST_STEPS, make_design, training_spec
from planning.pilot_fit import Objective, Result, continue_results, recommend
from planning.pilot_page import describe_trainings, format_recommendation, run_pilot
from planning.pilot_request import PilotRequest
from recipes.resolve import resolve

RECIPE, BUDGET = "qwen25_tiny_cpt", ["trainer.max_steps=1000", "decay_end=1000"]


def _request(**options: Any) -> PilotRequest:
    return PilotRequest(recipe=RECIPE, overrides=list(BUDGET), **{"budget": "60%", **options})


def _changes(rate: float, share: float) -> dict[str, float]:
    """New text is learned best at 6e-4; old text is forgotten by the rate and kept by replay."""
    x, z = math.log(rate / 6e-4), math.log(share / 0.25)
    return {"code": -0.5 + 0.1 * x**2 + 0.04 * z, "prose": 0.05 + 0.02 * x - 0.05 * z}


def test_a_training_is_the_run_with_its_schedule_compressed() -> None:
    design = make_design(_request(budget="45%"))
    assert (len(design.trainings), design.steps, design.share) == (12, 50, 0.25)
    assert design.budget == pytest.approx(0.45)
    assert {one.share for one in design.trainings} == {0.125, 0.5}
    assert sorted({one.rate for one in design.trainings}) == [3.3e-4, 1e-3, 3e-3]
    for one in design.trainings[6:]:
        plan = resolve(training_spec(design, one, "pilots/x/runs")).plan
        long, short = design.plan.learning_rate(), plan.learning_rate()
        assert (plan.max_steps, plan.max_lr, plan.replay_share) == (50, one.rate, one.share)
        for step in (5, 10, 25, 49):
            assert short.lr(step) / one.rate == pytest.approx(long.lr(20 * step) / design.plan.max_lr, rel=0.06)
        assert plan.val_check_interval == plan.save_every_n_steps == 50
    assert {resolve(training_spec(design, one, "r")).plan.max_steps for one in design.trainings[:6]} == {25}


def test_without_replay_only_the_learning_rate_is_tried() -> None:
    design = make_design(PilotRequest(recipe="qwen25_tiny", profile="wsd", budget="60%"))
    assert len(design.trainings) == 8 and {one.share for one in design.trainings} == {None}
    plan = resolve(training_spec(design, design.trainings[-1], "r")).plan
    budget = PilotRequest(recipe=RECIPE, overrides=["forgetting_budget={'prose': 0.1}", *BUDGET], budget="60%")
    assert {one.share for one in make_design(budget).trainings} == {None}
    assert (plan.max_steps, plan.fork_step, plan.decay_steps) == (40, 34, 6) and plan.min_lr == pytest.approx(
        plan.max_lr / 100, rel=0.01
    )


def test_a_small_budget_tries_fewer_points() -> None:
    """The command of the documents: 5% of 2000 steps hold three learning rates at two lengths, or six points at 9%."""
    small, large = (make_design(PilotRequest(recipe="qwen25_500m_cpt", budget=one)) for one in ("5%", "9%"))
    assert (len(small.trainings), small.share, small.steps) == (6, None, 22) and small.budget <= 0.05
    assert {one.share for one in small.trainings} == {None} and len({one.rate for one in small.trainings}) == 3
    assert "left out other replay shares" in " ".join(" ".join(describe_trainings(small)).split())
    assert (len(large.trainings), large.left_out) == (12, "")
    three = make_design(PilotRequest(recipe="qwen25_tiny", budget="25%"))
    assert len(three.trainings) == 6 and three.left_out == "a fourth learning rate"
    with pytest.raises(UserError, match="too small"):  # what the user names is not left out
        make_design(PilotRequest(recipe="qwen25_500m_cpt", budget="5%", shares="0.1,0.3"))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"budget": "1%"}, "too small"),
        ({"budget": "all"}, "no share of the run"),
        ({"budget": "0"}, "no share of the run"),
        ({"rates": "1,3"}, "too few learning rates"),
        ({"rates": "1,x,3"}, "cannot be used"),
        ({"rates": "0,1,3"}, "cannot be used"),
        ({"shares": "0,0.3"}, "too few replay shares"),
        ({"shares": "0.1,1.5"}, "cannot be used"),
        ({"max_forgetting": -1.0}, "out of range"),
    ],
)
def test_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        make_design(_request(**options))


def test_the_smallest_budget_that_works_is_said_and_works() -> None:
    with pytest.raises(UserError) as refused:
        make_design(_request(budget="1%"))
    assert make_design(_request(budget=refused.value.do.split()[-1])).steps >= LEAST_STEPS
    with pytest.raises(UserError, match="--shares needs replay"):
        make_design(PilotRequest(recipe="qwen25_tiny", budget="60%", shares="0.1,0.2"))


@pytest.mark.parametrize("recipe", ["qwen25_tiny", "qwen25_500m_single", "qwen25_500m_cpt"])
def test_the_least_budget_that_gives_numbers_is_said_and_does(recipe: str) -> None:
    """A larger budget may choose a design of more points, so that its trainings are shorter."""
    least = make_design(PilotRequest(recipe=recipe, budget="50%")).numbers_from
    assert least is not None and make_design(PilotRequest(recipe=recipe, budget=f"{least}%")).gives_numbers
    assert not make_design(PilotRequest(recipe=recipe, budget=f"{least - 1}%")).gives_numbers
    many = PilotRequest(recipe="qwen25_500m_cpt", budget="50%", rates="0.25,0.5,1,2", shares="0.05,0.3")
    assert make_design(many).numbers_from is None


@pytest.mark.parametrize(("budget", "states"), [("60%", False), ("100%", True)])
def test_numbers_are_not_continued_further_than_was_measured(budget: str, states: bool) -> None:
    """1,000 steps are 15 times the longest training of the one pilot and 9 times that of the other."""
    objective = Objective(("code",), ("prose",), None)
    design, found = make_design(_request(budget=budget)), recommend(_results(), 1e-3, 0.25, objective)
    text = " ".join(" ".join(format_recommendation(design, objective, found)).split())
    assert ("no numbers: the run is 15.2 times as long" in text) != states
    assert ("nats per token; better by" in text) == states


def _results(broken: Mapping[str, float] = MappingProxyType({})) -> list[Result]:
    found = []
    for rate in (3.3e-4, 1e-3, 3e-3):
        for share in (0.125, 0.5):
            name = f"lr-{rate:g}-replay-{share:g}"
            changes = dict.fromkeys(("code", "prose"), broken[name]) if name in broken else _changes(rate, share)
            found.append(Result(name, rate, share, 1000, changes))
    return found


def test_the_best_point_is_found() -> None:
    found = recommend(_results(), 1e-3, 0.25, Objective(("code",)))
    assert found.rate == pytest.approx(6e-4, rel=0.05) and found.share == pytest.approx(0.125)
    assert found.rate_range == pytest.approx((found.rate, found.rate), rel=0.1)  # the law is exact for these numbers
    assert found.gain == pytest.approx(_changes(1e-3, 0.25)["code"] - _changes(6e-4, 0.125)["code"], abs=1e-3)
    assert found.changes["prose"] == pytest.approx(_changes(found.rate, 0.125)["prose"], abs=1e-6)
    assert any("replay share is at the edge" in note for note in found.notes)


def test_a_change_is_continued_in_the_logarithm_of_the_length() -> None:
    short, long = (Result(f"a-{n}", 1e-3, 0.2, n, {"code": -0.1 * math.log2(n), "prose": 0.3}) for n in (20, 40))
    (found,) = continue_results([short, long], 640)
    assert found.changes == pytest.approx({"code": -0.1 * math.log2(640), "prose": 0.3})
    assert (found.name, found.steps) == ("a", 640)
    assert continue_results([short], 640) == []


def test_a_bound_on_forgetting_is_kept_or_said_to_be_impossible() -> None:
    found = recommend(_results(), 1e-3, 0.25, Objective(("code",), ("prose",), 0.05))
    assert found.changes["prose"] <= 0.05 + 1e-9 and found.changes["code"] < -0.45
    least = recommend(_results(), 1e-3, 0.25, Objective(("code",), ("prose",), -1.0))
    assert "no point that was tried keeps the bound" in least.notes[0] and least.share == pytest.approx(0.5)


def test_a_training_that_diverged_is_left_out() -> None:
    found = recommend(_results({"lr-0.003-replay-0.5": math.nan}), 1e-3, 0.25, Objective(("code",)))
    assert found.rate == pytest.approx(6e-4, rel=0.05)
    assert "left out: lr-0.003-replay-0.5" in found.notes[-2] and "nothing says how uncertain" in found.notes[-1]
    lost = {"lr-0.003-replay-0.125": math.inf, "lr-0.003-replay-0.5": math.nan}
    with pytest.raises(UserError, match="too few trainings"):
        recommend(_results(lost), 1e-3, 0.25, Objective(("code",)))


class Trainer:
    """Stands for the training processes: writes what a finished run leaves."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.commands: list[list[str]] = []
        self.fails_at = fails_at

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        words = dict(word.split("=", 1) for word in command if "=" in word)
        run = RunDir(command[command.index("--name") + 1], Path(command[command.index("--runs") + 1]))
        run.checkpoints.mkdir(parents=True)
        if len(self.commands) == self.fails_at:
            options["stderr"].write(
                "01-02 00:00:00 INFO    env A=1\n01-02 00:00:01 ERROR   no GPU\n  do this: buy one\n"
            )
            return subprocess.CompletedProcess(command, 1)
        steps = int(words["trainer.max_steps"])
        after = _changes(float(words["optim.config.lr"]), float(words["data.replay_share"]))
        rows = [(0, dict.fromkeys(after, 4.0)), (steps, {name: 4.0 + change for name, change in after.items()})]
        run.metrics.write_text(
            "".join(
                json.dumps({"step": step, "validation": {name: {"loss": loss} for name, loss in split.items()}}) + "\n"
                for step, split in rows
            )
        )
        status = {"phase": "done", "attempt": 1, "step": steps, "max_steps": steps, "world_size": 1, "host": "a"}
        run.status.write_text(json.dumps({**status, "pid": 1, "started": 0.0, "updated": 0.0, "ranks": []}))
        return subprocess.CompletedProcess(command, 0)


def test_a_pilot_is_kept_continued_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    broken, whole = Trainer(fails_at=3), Trainer()
    monkeypatch.setattr(subprocess, "run", broken)
    with pytest.raises(ProjectError, match="training of the pilot failed") as error:
        run_pilot(_request())
    assert error.value.found.endswith("says:\n01-02 00:00:01 ERROR   no GPU\n  do this: buy one")
    assert "diagnose" not in error.value.do  # the launcher refused it: there is no run to look at
    monkeypatch.setattr(subprocess, "run", whole)
    run_pilot(_request(max_forgetting=0.05))
    assert len(whole.commands) == 10 and not [one for one in whole.commands if one in broken.commands[:2]]
    out, err = capsys.readouterr()
    assert err.count("kept from before") == 2
    assert max(map(len, out.split("\n\n")[0].splitlines())) <= 100
    command = shlex.split(out.splitlines()[-1])
    assert command[1:4] == ["launch.py", "--recipe", RECIPE] and "trainer.max_steps=1000" in command
    folder = Path("pilots") / RECIPE
    kept = json.loads((folder / "pilot.json").read_text())
    assert kept["recommendation"]["changes"]["prose"] <= 0.05 + 1e-9 and len(kept["results"]) == 12
    assert f"optim.config.lr={kept['recommendation']['rate']:.2g}" in command
    assert (folder / "pilot.png").stat().st_size > 3000 and not list(folder.glob("runs/*/checkpoints"))
    run_pilot(_request())  # another objective on the same trainings
    assert len(whole.commands) == 10
    with pytest.raises(UserError, match="holds another pilot"):
        run_pilot(_request(rates="0.5,1,2"))
    assert highest_rate(None, "models/qwen25-tiny", Path("runs")) == (3e-3, str(folder))
    assert highest_rate(None, "models/other", Path("runs")) is None


def test_trainings_share_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = make_design(_request())
    gpu = make_design(PilotRequest(recipe="qwen25_500m_cpt", budget="20%"))
    two = make_design(PilotRequest(recipe="qwen25_500m_cpt", budget="20%", overrides=["trainer.devices=2"]))

    class Found:
        visible = tuple(type("Gpu", (), {"index": i})() for i in range(5))

    monkeypatch.setattr(machine_facts, "query_gpus", Found)
    assert pilot.find_slots(cpu) == [None]
    assert pilot.find_slots(gpu) == ["0", "1", "2", "3", "4"]
    assert pilot.find_slots(two) == ["0,1", "2,3"]
    Found.visible = Found.visible[:1]
    assert pilot.find_slots(gpu) == pilot.find_slots(two) == [None]
