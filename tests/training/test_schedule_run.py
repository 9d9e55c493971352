"""The learning rate that Megatron's optimizer really steps with: in one run, after a resume, in a longer run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from recipes.schedules import WSD, RewarmCosine

pytestmark = pytest.mark.nemo

COSINE = {"kind": "rewarm_cosine", "warmup_steps": 3, "min_lr": 1e-4, "decay_end": 10}
PEAK = 2e-3  # of qwen25_tiny


class RecordLr(pl.Callback):
    """Appends, per optimizer step, [s, lr of every parameter group at the moment of optimizer.step()]."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        optimizer = trainer.optimizers[0]
        step = optimizer.mcore_optimizer.step

        def recorded() -> Any:
            row = [trainer.global_step, [group["lr"] for group in optimizer.param_groups]]
            with Path("lr.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            return step()

        optimizer.mcore_optimizer.step = recorded


def _train(
    sample: Path, schedule: dict[str, Any] | None, steps: int, resume: bool = False, decoupled: float | None = None
) -> list[Any]:
    """`steps` steps of the tiny recipe with `schedule` (None: NeMo's cosine); returns all rows of lr.jsonl."""
    import nemo_run as run
    from nemo.lightning.pytorch.optim import CosineAnnealingScheduler

    from common.spec import RunSpec
    from launcher import launch as execute
    from recipes import registry
    from recipes.build.lr_slot import StepSchedule

    stock = {"warmup_steps": 3, "constant_steps": 0, "min_lr": 1e-4}
    recipe = registry.resolve("qwen25_tiny")
    build = recipe.build

    def changed(plan: Any) -> Any:
        partial = build(plan)
        slot = run.Config(StepSchedule, **schedule) if schedule else run.Config(CosineAnnealingScheduler, **stock)
        partial.optim.lr_scheduler = slot
        partial.optim.config.decoupled_lr = decoupled
        partial.trainer.callbacks.append(run.Config(RecordLr))
        return partial

    recipe.build = changed
    words: tuple[str, ...] = (f"data.paths={sample / 'prose'}", f"data.index_mapping_dir={Path.cwd() / 'cache'}")
    words += (f"trainer.max_steps={steps}", "trainer.val_check_interval=1000", "trainer.log_every_n_steps=1")
    assert execute.launch(RunSpec(recipe="qwen25_tiny", name="run", resume=resume, overrides=words)) == 0
    return [json.loads(line) for line in Path("lr.jsonl").read_text().splitlines()]


def test_step_s_is_made_with_lr_of_s(sample: Path, forked: Callable[..., Any]) -> None:
    """12 steps, then resumed to 16: every group, every step, to the last bit; trainer.max_steps has no say."""
    schedule = RewarmCosine(max_lr=PEAK, warmup_steps=3, min_lr=1e-4, decay_end=10)
    rows = forked(_train, sample, COSINE, 12)
    assert [step for step, _ in rows] == list(range(12))
    assert len(rows[0][1]) == 2  # with and without weight decay
    rows = forked(_train, sample, COSINE, 16, True)
    assert [step for step, _ in rows] == list(range(16))
    assert [lrs for _, lrs in rows] == [[schedule.lr(step)] * 2 for step in range(16)]


def test_fork_of_a_stable_phase(sample: Path, forked: Callable[..., Any]) -> None:
    """Six stable steps, then annealing from step 6 on: the past as it was, the decay from its first step."""
    stable = {"kind": "wsd", "warmup_steps": 2, "min_lr": 0.0}
    forked(_train, sample, stable, 6)
    rows = forked(_train, sample, {**stable, "max_lr": PEAK, "fork_step": 5, "decay_steps": 4}, 11, True)
    plan = WSD(max_lr=PEAK, warmup_steps=2, fork_step=5, decay_steps=4)
    expected = [WSD(max_lr=PEAK, warmup_steps=2).lr(s) if s < 6 else plan.lr(s) for s in range(11)]
    assert [lrs for _, lrs in rows] == [[lr] * 2 for lr in expected]
    assert rows[6][1][0] < PEAK  # the first step after the resume has this run's lr, not the checkpoint's


def test_decoupled_lr_is_followed(sample: Path, forked: Callable[..., Any]) -> None:
    """Megatron gives embeddings their own peak; stock NeMo drops it and logs nothing."""
    ours = forked(_train, sample, COSINE, 4, False, 4 * PEAK)
    peaks = sorted({round(lr / RewarmCosine(**_parameters()).lr(3), 6) for lr in ours[3][1]})
    assert peaks == [1.0, 4.0]


def _parameters() -> dict[str, Any]:
    return {"max_lr": PEAK, **{name: value for name, value in COSINE.items() if name != "kind"}}


def test_stock_reshapes_and_ours_does_not(sample: Path, forked: Callable[..., Any], tmp_path: Path) -> None:
    """NeMo's cosine: a resume with larger max_steps starts at the minimum, an uninterrupted run does not."""
    for name in ("uninterrupted", "resumed", "decoupled"):
        (tmp_path / name).mkdir()
    uninterrupted = [lrs[0] for _, lrs in forked(_train, sample, None, 14, cwd=tmp_path / "uninterrupted")]
    first = [lrs[0] for _, lrs in forked(_train, sample, None, 8, cwd=tmp_path / "resumed")]
    resumed = [lrs[0] for _, lrs in forked(_train, sample, None, 14, True, cwd=tmp_path / "resumed")]
    assert first[4:8] != pytest.approx(uninterrupted[4:8])  # trainer.max_steps changes the steps already done
    assert resumed[9:] == pytest.approx([1e-4] * 5)  # and the resumed run has no decay left
    assert uninterrupted[9] > 5e-4
    dropped = forked(_train, sample, None, 4, False, 4 * PEAK, cwd=tmp_path / "decoupled")
    assert len(set(dropped[3][1])) == 1  # three groups, one lr: decoupled_lr has no effect


def _override(recipe: Any, words: tuple[str, ...]) -> list[str]:
    from recipes import overrides

    return overrides.apply_to_recipe(recipe, overrides.parse(words))


def test_written_read_and_overridden() -> None:
    """As YAML in config.yaml, as words on the command line; a wrong name or type is refused as everywhere."""
    import yaml

    from common.errors import UserError
    from launcher import build
    from recipes import profiles, registry

    for name in profiles.PROFILES:
        tiny = registry.resolve("qwen25_tiny")
        declared = tiny.plan.changed(profile=name)
        recipe = tiny.build(declared)
        slot = yaml.safe_load(build.to_yaml(recipe))["optim"]["lr_scheduler"]
        assert slot.pop("_target_") == "recipes.build.lr_slot.StepSchedule" and slot == profiles.parameters(name, 400)
        assert declared.as_resolved(recipe) == declared
        assert declared.learning_rate() == profiles.schedule(name, 400)
    words = ("optim.lr_scheduler.max_lr=4e-5", "optim.lr_scheduler.fork_step=300", "optim.lr_scheduler.decay_steps=100")
    lines = _override(recipe, words)
    assert lines[0] == "optim.lr_scheduler.max_lr: None -> 4e-05"
    _override(recipe, ("optim.lr_scheduler.decay_shape=linear",))
    import fiddle

    built = fiddle.build(recipe.optim.lr_scheduler).schedule(recipe.optim.config.lr)
    expected = WSD(max_lr=4e-5, min_lr=5e-7, warmup_steps=4, decay_shape="linear")
    assert built == expected.fork(300, 100)
    for wrong in ("optim.lr_scheduler.fork=3", "optim.lr_scheduler.fork_step=soon", "optim.lr_scheduler.max_steps=9"):
        with pytest.raises(UserError):
            _override(recipe, (wrong,))


def _walk(scheduler: Any, steps: int) -> list[list[float]]:
    lrs = []
    for _ in range(steps):
        lrs.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return lrs


def _adam(**group: Any) -> Any:
    import torch

    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(1))], **group}], lr=PEAK)


def test_equals_nemos_cosine_of_the_same_length() -> None:
    """So a recipe can change over to StepSchedule without another loss in the last bit."""
    from nemo.core.optim.lr_scheduler import CosineAnnealing

    from recipes.build.lr_slot import ScheduleLR

    stock = CosineAnnealing(_adam(), max_steps=40, warmup_steps=5, constant_steps=0, min_lr=1e-4)
    ours = ScheduleLR(_adam(), RewarmCosine(max_lr=PEAK, min_lr=1e-4, warmup_steps=5, decay_end=40))
    assert _walk(ours, 60) == _walk(stock, 60)


def test_restore_takes_the_position_only(caplog: pytest.LogCaptureFixture) -> None:
    from recipes.build.lr_slot import ScheduleLR

    stable = WSD(max_lr=PEAK, warmup_steps=3)
    first = ScheduleLR(_adam(pre_lr_mult=0.5), stable)
    assert _walk(first, 8)[3:] == [[PEAK / 2]] * 5
    second = ScheduleLR(_adam(pre_lr_mult=0.5), stable.fork(8, 4))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert _walk(second, 6) == [[stable.fork(8, 4).lr(step) / 2] for step in range(8, 14)]
    with caplog.at_level("INFO", logger="launch"):
        ScheduleLR(_adam(), stable.fork(8, 4)).load_state_dict(first.state_dict())
        assert "everything before it is the same" in caplog.text
        ScheduleLR(_adam(), WSD(max_lr=PEAK / 2, warmup_steps=3)).load_state_dict(first.state_dict())
        assert "already at step 0" in caplog.text and "step 8 would have been 0.002, and is 0.001" in caplog.text


def test_decoupled_minimum_is_refused() -> None:
    from common.errors import UserError
    from recipes.build.lr_slot import ScheduleLR

    with pytest.raises(UserError, match="decoupled_min_lr"):
        ScheduleLR(_adam(is_decoupled_lr=True, max_lr=PEAK, min_lr=1e-5), WSD(max_lr=PEAK))
