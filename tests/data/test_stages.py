"""Stages of a blend: every boundary is a step before training, the numbers add up, wrong ones are explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.blend import parse_blend
from data.resolve_stages import resolve_stages
from data.stages import RunLength, resolve_until
from recipes.schedules import WSD, Polish, RewarmCosine, Schedule

ROOT = Path(__file__).resolve().parents[2]
DECAY = WSD(max_lr=1.0, warmup_steps=10, fork_step=160, decay_steps=40, decay_shape="linear")


def _run(schedule: Schedule = DECAY, max_steps: int = 200) -> RunLength:
    return RunLength(max_steps, 4, 256, schedule)


def _blend(sample: Path, *stages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    domains = [
        {"name": name, "folder": str(sample / name), "role": role}
        for name, role in (("code", "new"), ("prose", "replay"))
    ]
    return {"domains": domains, "replay_share": 0.25, "stages": list(stages), **fields}


@pytest.mark.parametrize(
    ("until", "schedule", "step"),
    [
        ("100k", DECAY, 98),
        (102_400, DECAY, 100),
        ("80%", DECAY, 160),
        ("decay_start", DECAY, 160),
        ("lr <= peak/5", DECAY, 192),
        ("lr<=peak/2.5", DECAY, 184),
        ("lr <= peak/1", DECAY, 10),
        ("decay_start", RewarmCosine(max_lr=1.0, min_lr=0.1, warmup_steps=20, decay_end=200), 20),
        ("lr <= peak/5", Polish(max_lr=1.0, decay_end=200), 143),
    ],
)
def test_where_a_stage_ends(until: str | int, schedule: Schedule, step: int) -> None:
    assert resolve_until("main", until, _run(schedule)) == step


@given(divisor=st.floats(1, 90), steps=st.integers(30, 400), shape=st.sampled_from(["linear", "1-sqrt"]))
@settings(max_examples=50, deadline=None)
def test_the_learning_rate_of_a_boundary(divisor: float, steps: int, shape: str) -> None:
    """The first step of all at which it has fallen so far; found by bisection."""
    schedule = WSD(max_lr=1.0, min_lr=0.01, warmup_steps=10, fork_step=20, decay_steps=steps, decay_shape=shape)
    found = resolve_until("main", f"lr <= peak/{divisor:.3f}", _run(schedule, 500))
    limit = 1 / float(f"{divisor:.3f}")
    assert found == next(step for step in range(10, 500) if schedule.lr(step) <= limit)


def test_the_numbers_of_the_stages(sample: Path) -> None:
    """Tokens of all stages are the run's, the table names each, and blend.json keeps them."""
    main, anneal = {"name": "main", "until": "decay_start"}, {"name": "anneal", "replay_share": 0.5}
    found = resolve_stages(_blend(sample, main, anneal), _run())
    assert [(stage.first, stage.end) for stage in found.stages] == [(0, 160), (160, 200)]
    assert found.stages[0].tokens == {"code": 160 * 768, "prose": 160 * 256}
    assert found.stages[1].tokens == {"code": 40 * 512, "prose": 40 * 512}
    assert sum(domain.tokens_planned for domain in found.blend.domains) == found.blend.total_tokens == 200 * 1024
    assert found.blend.replay_share == pytest.approx(0.3)
    lines = found.table()
    assert "160 to 200" in lines[-1] and "50.00%" in lines[-1] and lines[-2].startswith("anneal")
    rows = json.loads(found.to_json())
    assert rows["stages"][0]["until"] == "decay_start" and rows["total_tokens"] == 200 * 1024
    one = resolve_stages(_blend(sample), _run())
    assert not one.has_stages and one.stages[0].tokens == {d.name: d.tokens_planned for d in one.blend.domains}


def test_weights_of_a_stage_name_what_it_reads(sample: Path, tmp_path: Path) -> None:
    """Of a role that is named, only the named domains; of the other one, as the blend says."""
    import shutil

    best = shutil.copytree(sample / "code", tmp_path / "best")
    blend = _blend(sample, {"until": "50%", "weights": {"code": 1}}, {"weights": {"best": 3, "code": 1}})
    blend["domains"].append({"name": "best", "folder": str(best), "role": "new"})
    first, last = resolve_stages(blend, _run()).stages
    assert first.within == {"code": 1.0, "prose": 1.0} and last.within == {"best": 0.75, "code": 0.25, "prose": 1.0}
    alone = _blend(sample, {"until": "50%"}, {"replay_share": 0})
    assert list(resolve_stages(alone, _run()).stages[1].tokens) == ["code"]
    shared = resolve_stages(_blend(sample, {"until": "50%"}, {"replay_share": 0.5}), _run(), replay_share=0.1)
    assert [stage.replay_share for stage in shared.stages] == [0.1, 0.5]


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([{}, {}], "stage stage-1 has no end"),
        ([{"until": "80%"}, {"until": "90%"}], "the last stage, stage-2, has an end"),
        ([{"until": "80%", "name": "a"}, {"name": "a"}], "two stages have the same name"),
        ([{"until": "soon"}, {}], "cannot read its until"),
        ([{"until": True}, {}], "stages[0].until"),
        ([{"until": "100%"}, {}], "stage-1 never ends"),
        ([{"until": "1T"}, {}], "stage-1 never ends"),
        ([{"until": "50%"}, {"until": "10%"}, {}], "stage-2 has no step of its own"),
        ([{"until": "0.1%"}, {}], "has no step of its own"),
        ([{"until": "lr <= peak/1000"}, {}], "which this run never reaches"),
        ([{"until": "80%", "weights": {"cod": 1}}, {}], "did you mean code?"),
        ([{"until": "80%", "weights": {"code": 0}}, {}], "a weight must be above 0"),
        ([{"until": "80%", "replay_share": 1.5}, {}], "stages[0].replay_share"),
        ([{"until": "80%", "when": 3}, {}], "in a stage: name, until, weights, replay_share"),
        ([{"until": "80%"}, {"weights": {"prose": 1}, "replay_share": 0}], "stage stage-2: a replay domain without"),
    ],
)
def test_wrong_stages(sample: Path, stages: list[dict[str, Any]], words: str) -> None:
    schedule = WSD(max_lr=1.0, min_lr=0.01, warmup_steps=10, fork_step=160, decay_steps=40)
    with pytest.raises(UserError) as error:
        resolve_stages(_blend(sample, *stages), _run(schedule))
    assert words in str(error.value) and error.value.do


def test_a_schedule_without_a_decay(sample: Path) -> None:
    with pytest.raises(UserError, match="never decays") as error:
        resolve_stages(_blend(sample, {"until": "decay_start"}, {}), _run(WSD(max_lr=1.0)))
    assert "fork_step" in error.value.do


def test_a_wrong_stage_is_refused_at_once(sample: Path, tmp_path: Path) -> None:
    """As typed, before NeMo is imported: exit code 3 with the reason, and --epochs does not go with stages."""
    blend = _blend(sample, {"until": "decay_strat"}, {})
    (tmp_path / "blend.json").write_text(json.dumps(blend))
    command = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny_cpt", "data.blend=blend.json"]
    command += [f"resume.base={tmp_path}", "--dryrun"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and done.stderr.count("cannot read its until") == 1
    assert "loading NeMo" not in done.stderr
    more = subprocess.run([*command, "--epochs", "1"], cwd=tmp_path, capture_output=True, text=True)
    assert more.returncode == 2 and "--epochs with a blend of stages" in more.stderr


def test_a_blend_without_stages_is_what_it_was(sample: Path) -> None:
    assert parse_blend(_blend(sample)).parts[0][0] == "all"
    with pytest.raises(UserError, match="a replay domain without a share"):
        parse_blend(_blend(sample, replay_share=0))
    assert parse_blend(_blend(sample, {"until": "9%"}, {"replay_share": 0.5}, replay_share=0)).stages


def test_the_example_of_the_docs_resolves() -> None:
    """docs/examples/annealing.yaml: two stages, the second from the decay on. Each blend in docs/blend.md is one."""
    import re

    from data.stages import resolve_boundaries
    from launcher import run_file
    from recipes.resolve import resolve
    from recipes.stages import run_length

    plan = resolve(run_file.load(ROOT / "docs/examples/annealing.yaml")).plan
    blend = parse_blend(plan.blend)
    decay = next(phase.first for phase in plan.learning_rate().phases() if phase.name == "decay")
    assert resolve_boundaries(blend.stages, run_length(plan)) == [(0, decay), (decay, plan.max_steps)]
    assert [[domain.name for domain in part.trained] for _, part in blend.parts] == [
        ["new", "replay"],
        ["best", "replay"],
    ]
    import yaml

    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "docs/blend.md").read_text(), flags=re.S | re.M)
    assert [len(parse_blend(yaml.safe_load(block)).stages) for block in blocks][:2] == [0, 2]
