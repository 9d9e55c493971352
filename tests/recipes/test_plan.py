"""Plans, registry, overrides as far as they are known without NeMo, the length of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from common.errors import UserError
from common.quantities import parse_count
from common.spec import RunSpec
from data.manifest import load_manifest
from launcher.run_length import with_length
from recipes import overrides, registry
from recipes.qwen25 import QWEN25_500M, REDUCED
from recipes.resolve import resolve


def test_parameter_counts() -> None:
    assert QWEN25_500M.num_parameters == 494_032_768  # the HF model card's model
    assert REDUCED.num_parameters == 306_543_360
    untied = dataclasses.replace(QWEN25_500M, tied=False)
    assert untied.num_parameters - QWEN25_500M.num_parameters == 151_936 * 896


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError) as error:
        registry.resolve("qwen25_500m_singel")
    assert "did you mean --recipe qwen25_500m_single?" in error.value.do
    assert error.value.exit_code == 2


def test_every_registered_recipe_resolves_and_says_what_it_is() -> None:
    for name, recipe in registry.recipes().items():
        assert recipe.__name__ == name
        assert recipe.summary


def test_overrides_reach_the_plan_early() -> None:
    plan = registry.resolve("qwen25_500m_single").plan
    words = ("data.micro_batch_size=2", "model.config.num_layers=8", "data.paths='corpora/x'", "optim.config.lr=1e-4")
    changed = overrides.apply_to_plan(plan, overrides.parse(words))
    assert (changed.micro_batch_size, changed.shape.num_layers, changed.data) == (2, 8, "corpora/x")
    assert changed.max_lr == 1e-4
    assert changed.shape.num_parameters == 306_543_360 - 4 * 6_097_408


def test_one_spec_gives_one_plan_whatever_the_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(recipe="qwen25_500m_dual", overrides=("trainer.max_steps*=2", "data.replay_share=None"))
    plan = resolve(spec).plan
    assert plan.max_steps == 4000 and plan.replay_share is None
    monkeypatch.setenv("CPT_PROCESS_GROUP_BACKEND", "gloo")
    assert resolve(spec).plan == plan
    on_gloo = resolve(dataclasses.replace(spec, process_group_backend="gloo"))
    assert on_gloo.plan.process_group_backend == "gloo" and not on_gloo.plan.distributed_optimizer
    monkeypatch.delenv("CPT_PROCESS_GROUP_BACKEND")
    assert resolve(on_gloo.spec).plan == on_gloo.plan


def test_a_recipe_file_of_ones_own(tmp_path: Path) -> None:
    """docs/my-own-recipe.md: one function in one file."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from recipes.qwen25 import qwen25_500m_cpt\n"
        "from recipes.registry import recipe\n\n"
        "@recipe(qwen25_500m_cpt, profile='strong', max_steps=500)\n"
        "def qwen25_mine(plan):\n"
        "    'Half an hour of my text.'\n"
        "    from recipes.build.assemble import pretrain\n\n"
        "    return pretrain(plan)\n"
    )
    listed = list(registry.recipes())
    found = registry.resolve(f"{file}:qwen25_mine")
    assert found.summary == "Half an hour of my text."
    assert list(registry.recipes()) == listed
    assert (found.plan.max_lr, found.plan.decay_end, found.plan.base) == (1e-4, 500, "Qwen/Qwen2.5-0.5B")
    with pytest.raises(UserError, match=f"{file}:qwen25_mine"):
        registry.resolve(f"{file}:qwen25_other")
    with pytest.raises(UserError, match="no recipe file"):
        registry.resolve(f"{tmp_path}/nowhere.py:qwen25_mine")


@pytest.mark.parametrize("word", ("data.micro_batch_size=two", "trainer.max_steps=1.5", "--max-steps", "=3", "a b=c"))
def test_unreadable_overrides(word: str) -> None:
    with pytest.raises(UserError):
        resolve(RunSpec(recipe="qwen25_tiny", overrides=(word,)))


def test_the_last_part_of_a_path_is_enough() -> None:
    found = overrides.parse(("max_steps=50", "trainer.max_steps*=2", "micro_batch_size=2"))
    assert [str(one) for one in found] == ["trainer.max_steps=50", "trainer.max_steps*=2", "data.micro_batch_size=2"]
    assert resolve(RunSpec(recipe="qwen25_tiny", overrides=("max_steps=50",))).plan.max_steps == 50
    with pytest.raises(UserError, match="several paths") as error:
        overrides.parse(("seq_length=128",))
    assert error.value.do == "data.seq_length=128"


@pytest.mark.parametrize(
    ("word", "do"),
    (
        ("log.ckpt.dirpath=/tmp", "--runs DIR"),
        ("log.explicit_log_dir=/tmp", "--runs DIR"),
        ("trainer.callbacks=[]", "--no-gates"),
        ("resume.resume_from_path=/tmp", "launch.py resume"),
    ),
)
def test_what_the_launcher_sets_is_refused_with_the_way_to_say_it(word: str, do: str) -> None:
    with pytest.raises(UserError, match="set by the launcher") as error:
        overrides.parse((word,))
    assert do in error.value.do


def test_length_and_batch_in_tokens() -> None:
    """Whole micro batches, whole steps, and the schedule laid out over them."""
    spec = RunSpec(recipe="qwen25_500m", tokens=parse_count("2B", "--tokens"), tokens_per_step=500_000)
    plan = resolve(spec).plan
    assert plan.global_batch_size == 244 and plan.global_batch_size % plan.micro_batch_size == 0
    assert plan.max_steps == plan.decay_end == 4003  # 2e9 / (244 x 2048) = 4002.3
    two = resolve(dataclasses.replace(spec, overrides=("trainer.devices=2", "data.micro_batch_size=16"))).plan
    assert two.global_batch_size == 256
    kept = resolve(dataclasses.replace(spec, overrides=("optim.lr_scheduler.decay_end=100",))).plan
    assert (kept.max_steps, kept.decay_end) == (4003, 100)
    with pytest.raises(UserError, match="both say"):
        resolve(dataclasses.replace(spec, overrides=("trainer.max_steps=5",)))
    assert resolve(RunSpec(recipe="qwen25_500m_cpt", profile="wsd")).plan.schedule == "wsd"
    with pytest.raises(UserError, match="did you mean --profile strong"):
        resolve(RunSpec(recipe="qwen25_500m_cpt", profile="stron"))


def test_epochs_count_the_new_text(sample: Path) -> None:
    tokens = load_manifest(sample / "code").splits["train"].tokens
    domains = [{"name": name, "folder": str(sample / name), "role": role} for name, role in ROLES.items()]
    words = (f"data.blend={{'domains': {domains}, 'replay_share': 0.25}}",)
    blended = resolve(with_length(RunSpec(recipe="qwen25_tiny_cpt", overrides=words), None, 2.0, None)).spec
    assert blended.tokens is not None and abs(blended.tokens - 2 * tokens / 0.75) <= 1
    spec = RunSpec(recipe="qwen25_tiny", overrides=(f"data.paths={sample / 'code'}",))
    one = resolve(with_length(spec, None, 0.5, None)).spec
    assert one.tokens == -(-tokens // 2)
    with pytest.raises(UserError, match="both say how long"):
        with_length(RunSpec(recipe="qwen25_tiny"), "2B", 1.0, None)


ROLES = {"code": "new", "prose": "replay"}
