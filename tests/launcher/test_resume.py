"""What may change when a run is resumed."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.checkpoint_files import record_files
from common.errors import UserError
from common.rundir import RunDir
from common.spec import RunSpec
from launcher import batch_size, resume
from recipes import registry
from recipes.plan import Plan
from recipes.resolve import changes, continue_run, resolve

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "config" / "qwen25_tiny.yaml"


def _changed(path: str, value: object) -> tuple[dict[str, Any], dict[str, Any]]:
    before = yaml.safe_load(GOLDEN.read_text())
    now = copy.deepcopy(before)
    owner = now
    *steps, leaf = path.split(".")
    for step in steps:
        owner = owner[step]
    owner[leaf] = value
    return before, now


@pytest.mark.parametrize(
    ("path", "value"),
    (
        ("model.config.num_layers", 8),
        ("data.seq_length", 128),
        ("data.global_batch_size", 8),
        ("data.paths", "corpora/other"),
        ("optim.config.use_distributed_optimizer", True),
    ),
)
def test_refused(path: str, value: object) -> None:
    with pytest.raises(UserError, match="cannot change") as error:
        resume.check(*_changed(path, value), Path("step-5"))
    assert path in str(error.value)


def test_allowed_changes_are_told() -> None:
    assert resume.check(*_changed("trainer.max_steps", 800), Path("step-5")) == ["trainer.max_steps: 400 -> 800"]
    assert resume.check(*_changed("log.ckpt.dirpath", "elsewhere"), Path("step-5")) == []


def test_unfinished_checkpoints_are_set_aside(tmp_path: Path) -> None:
    run = RunDir("r", tmp_path)
    for step in (5, 10):
        (run.checkpoints / f"step-{step}" / "weights").mkdir(parents=True)
        (run.checkpoints / f"step-{step}" / "weights" / "metadata.json").touch()
    (run.checkpoints / "step-10-unfinished").touch()
    (run.checkpoints / "step-15-unfinished").touch()  # killed before the folder was made
    assert [p.name for p in run.set_aside_unfinished()] == ["unfinished-step-10-after-attempt-0"]
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-5", "unfinished-step-10-after-attempt-0"]
    assert [p.name for p in run.complete_checkpoints()] == ["step-5"]


def _plan(**changes: Any) -> Plan:
    return dataclasses.replace(registry.resolve("qwen25_tiny").plan, **changes)


def test_a_longer_run_must_not_reshuffle(sample: Path) -> None:
    """Within an epoch a run can be extended; over its end only if it was laid out for that."""
    before = yaml.safe_load(GOLDEN.read_text())
    plan = _plan(data=str(sample / "prose"))
    resume.check_order(before, dataclasses.replace(plan, max_steps=500), None)
    with pytest.raises(UserError, match="another order"):
        resume.check_order(before, dataclasses.replace(plan, max_steps=800), None)
    before["data"]["train_steps"] = None  # as a run of a recipe writes it that leaves it open
    resume.check_order(before, dataclasses.replace(plan, max_steps=500), None)
    before["data"]["train_steps"] = 800
    resume.check_order(before, dataclasses.replace(plan, max_steps=800), 800)


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    run = RunDir("r", tmp_path)
    (run.checkpoints / "step-400" / "weights").mkdir(parents=True)
    (run.checkpoints / "step-400" / "weights" / "metadata.json").touch()
    record_files(run.checkpoints / "step-400")
    said = resume.describe_if_complete(run, _plan())
    assert said is not None and "complete already: step 400 of 400" in said
    assert said.endswith(f"launch.py resume {run.path} trainer.max_steps=800")
    assert resume.describe_if_complete(run, _plan(max_steps=401)) is None


def test_a_corpus_prepared_again_is_noticed(sample: Path, tmp_path: Path) -> None:
    run = RunDir("r", tmp_path)
    run.path.mkdir()
    now = {"c": json.loads((sample / "prose" / "manifest.json").read_text())}
    run.data.write_text(json.dumps(now))
    resume.check_data(run, now)
    now["c"]["splits"]["train"]["bin_sha256"] = "0" * 64
    with pytest.raises(UserError, match="prepared again"):
        resume.check_data(run, now)


def test_a_resumed_run_stands_on_its_recorded_words() -> None:
    """What is asked for now replaces the recorded word of the same path; everything else stays as it was."""
    recorded = RunSpec(
        recipe="qwen25_tiny",
        executor="slurm",
        cluster="site.yaml",
        env="cpu+dev",
        overrides=("optim.lr_scheduler.warmup_steps=5", "trainer.max_steps=100", "data.micro_batch_size=2"),
    )
    asked = RunSpec(recipe="qwen25_tiny", name="r", resume=True, overrides=("trainer.max_steps=200",))
    found = continue_run(resolve(recorded), asked).spec
    assert found.overrides == ("optim.lr_scheduler.warmup_steps=5", "data.micro_batch_size=2", "trainer.max_steps=200")
    assert (found.executor, found.cluster, found.env, found.name) == ("slurm", "site.yaml", "cpu+dev", "r")
    doubled = continue_run(resolve(recorded), dataclasses.replace(asked, overrides=("trainer.max_steps*=2",)))
    assert doubled.plan.max_steps == resolve(doubled.spec).plan.max_steps == 200
    shown = changes(resolve(recorded).plan, doubled.plan)
    assert shown == ["trainer.max_steps: 100 -> 200"]
    local = resolve(dataclasses.replace(recorded, executor="local"))
    assert continue_run(local, asked).spec.executor is None  # the number of ranks may be another now
    with pytest.raises(UserError, match="another recipe"):
        continue_run(resolve(recorded), dataclasses.replace(asked, recipe="qwen25_500m"))


def test_a_resumed_batch_is_the_recorded_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The recorded batch in smaller pieces where more replicas share it; a number of the user's own stays."""
    run = RunDir("r", tmp_path)
    run.path.mkdir()
    began = RunSpec(recipe="qwen25_500m_dual", overrides=("data.micro_batch_size=3", "data.global_batch_size=126"))
    run.spec_file.write_text(began.to_json())
    for words, expected in (
        ((), 3),
        (("trainer.devices=9",), 2),  # 14 samples per replica, which 3 does not divide
        (("trainer.devices=9", "data.micro_batch_size=5"), 5),  # preflight refuses it
    ):
        asked = RunSpec(recipe="qwen25_500m_dual", name="r", resume=True, overrides=words)
        resolved = continue_run(resolve(began), asked)
        assert batch_size.fit(resolved, run, batch_size.Gpus(24.0)).plan.micro_batch_size == expected
