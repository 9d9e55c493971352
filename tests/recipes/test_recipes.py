"""Every recipe resolved: goldens, plan and Partial agree, overrides are strict. One NeMo import for all."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fiddle
import pytest

from common.errors import UserError
from common.spec import RunSpec
from launcher import build
from recipes import known_paths, overrides, profiles, registry
from recipes.resolve import resolve

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "config"


@pytest.fixture(scope="module")
def partials() -> dict[str, Any]:
    return {name: registry.resolve(name)() for name in registry.recipes()}


@pytest.mark.parametrize("name", registry.recipes())
def test_golden(name: str, partials: dict[str, Any]) -> None:
    """Changed on purpose? `UPDATE_GOLDENS=1 pytest tests/recipes` writes them anew: read the diff."""
    golden = GOLDENS / f"{name}.yaml"
    found = build.to_yaml(partials[name])
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(found)
    assert found == golden.read_text()


@pytest.mark.parametrize("name", registry.recipes())
def test_plan_and_partial_agree(name: str, partials: dict[str, Any]) -> None:
    """Preflight reads the plan, training the Partial: they must be the same numbers."""
    for path, value in registry.resolve(name).plan.values().items():
        owner: Any = partials[name]
        for step in path.split("."):
            owner = getattr(owner, step, None)
        assert owner == value, path


def test_the_single_gpu_recipe_is_the_documented_one(partials: dict[str, Any]) -> None:
    recipe = partials["qwen25_500m_single"]
    config, data, strategy = recipe.model.config, recipe.data, recipe.trainer.strategy
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (12, 768, 2048)
    assert (config.num_attention_heads, config.num_query_groups) == (12, 2)
    assert (data.seq_length, data.micro_batch_size, data.global_batch_size) == (2048, 1, 4)
    assert (data.num_workers, data.pin_memory) == (2, True)
    assert (recipe.trainer.devices, recipe.trainer.num_nodes) == (1, 1)
    assert strategy.tensor_model_parallel_size == strategy.pipeline_model_parallel_size == 1
    assert strategy.context_parallel_size == 1


def _apply(recipe: Any, words: tuple[str, ...]) -> list[str]:
    return overrides.apply_to_recipe(recipe, overrides.parse(words))


def test_one_gpu_recipe_on_two_gpus_is_the_two_gpu_recipe() -> None:
    """What follows from the number of ranks follows from it however the number was given."""
    words = ("trainer.devices=2", "data.micro_batch_size=17", "data.global_batch_size=136")
    one = resolve(RunSpec(recipe="qwen25_500m", overrides=words))
    two = resolve(RunSpec(recipe="qwen25_500m_dual"))
    assert build.to_yaml(one.recipe.build(one.plan)) == build.to_yaml(two.recipe.build(two.plan))
    assert one.plan.environment_set == two.plan.environment_set == "dual"


def test_a_variant_lays_its_schedule_out_again() -> None:
    plan = registry.resolve("qwen25_500m").plan
    assert plan.changed(max_steps=300).decay_end == 300
    assert dataclasses.replace(plan, max_steps=300).decay_end == plan.max_steps  # an override extends, and keeps it
    strong = registry.resolve("qwen25_500m_cpt").plan.changed(profile="strong")
    assert (strong.max_lr, strong.min_lr, strong.warmup_steps) == (1e-4, 1e-5, 20)
    wsd = registry.resolve("qwen25_500m_cpt").plan.changed(profile="wsd", max_steps=400)
    assert wsd.learning_rate() == profiles.schedule("wsd", 400)


def test_overrides_apply_and_say_so(partials: dict[str, Any]) -> None:
    recipe = copy.deepcopy(partials["qwen25_tiny"])
    lines = _apply(
        recipe,
        (
            "data.micro_batch_size=2",
            "optim.config.lr=0.001",
            "trainer.max_steps*=2",
            "data.paths=corpora/x y",
            "data.index_mapping_dir=/tmp/cache",
            "log.ckpt.keep_last=5",
            "data.eod_mask_loss=True",
            "trainer.devices=2",  # Union[list[int], str, int] upstream
            "model.config.init_method_std=0.05",  # annotated int upstream
        ),
    )
    assert lines[0] == "data.micro_batch_size: 4 -> 2"
    assert (recipe.data.micro_batch_size, recipe.optim.config.lr, recipe.trainer.max_steps) == (2, 0.001, 800)
    assert (recipe.data.paths, recipe.data.index_mapping_dir) == ("corpora/x y", "/tmp/cache")
    assert (recipe.log.ckpt.keep_last, recipe.data.eod_mask_loss) == (5, True)
    assert recipe.model.config.init_method_std == 0.05
    assert recipe.trainer.devices == 2
    _apply(recipe, ("data.paths={'train': ['a'], 'validation': ['b'], 'test': ['c']}",))
    assert recipe.data.paths["validation"] == ["b"]


def test_known_paths_are_those_of_the_classes(partials: dict[str, Any]) -> None:
    """recipes/known_paths.txt, which finds unknown paths before NeMo is imported."""
    from launcher.paths import walk

    found = {line.split("=", 1)[0] for partial in partials.values() for line in walk(partial, "")}
    text = "\n".join([known_paths.versions(), *sorted(found)]) + "\n"
    if os.environ.get("UPDATE_GOLDENS"):
        known_paths.FILE.write_text(text)
    if known_paths.FILE.read_text().splitlines()[0] != known_paths.versions():
        pytest.skip("the list is of other versions, and so not used")
    assert known_paths.FILE.read_text() == text


@pytest.mark.parametrize(
    ("word", "hint"),
    (
        ("data.micro_batch=2", "did you mean data.micro_batch_size"),
        ("data.micro_batch_sise=2", "did you mean data.micro_batch_size"),
        ("trainer.strategy.gradient_as_bucket_view=True", ""),  # stock NeMo swallows it
        ("trainer.strategy.tensor_parallel=2", "tensor_model_parallel_size"),
        ("modle.config.num_layers=8", "did you mean model.config.num_layers=8?"),
        ("model.config.num_layers.x=8", "launch.py paths"),
        ("trainer.callbacks[7].x=3", "launch.py paths"),
        ("data.micro_batch_size=two", "data.micro_batch_size=4, as the recipe"),
        ("data.eod_mask_loss=maybe", "data.eod_mask_loss=False, as the recipe"),
    ),
)
def test_wrong_overrides(word: str, hint: str, partials: dict[str, Any]) -> None:
    recipe = copy.deepcopy(partials["qwen25_tiny"])
    with pytest.raises(UserError) as error:
        _apply(recipe, (word,))
    assert hint in error.value.do
    assert build.to_yaml(recipe) == build.to_yaml(partials["qwen25_tiny"])


def test_dryrun_prints_yaml_alone(tmp_path: Path) -> None:
    """As a user runs it: YAML on standard output, everything else on standard error, files written.

    This machine has no corpus there (and maybe no GPU): preflight says so, and the exit code is preflight's.
    """
    import yaml

    command = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_500m_single", "--dryrun"]
    done = subprocess.run([*command, "--write", "max_steps=150"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "corpora/mine" in done.stderr
    config = yaml.safe_load(done.stdout)
    assert config["trainer"]["max_steps"] == 150
    assert config["model"]["config"]["num_layers"] == 12
    assert "306,543,360 parameters" in done.stderr
    run = tmp_path / "runs" / "qwen25_500m_single"
    assert (run / "config.yaml").read_text() == done.stdout
    keys = {row["key"] for row in json.loads((run / "env.json").read_text())}
    assert "NCCL_NVLS_ENABLE" in keys
    assert (run / "command.txt").read_text().rstrip().endswith("max_steps=150")


def test_without_gates_only_the_gates_are_left_out(partials: dict[str, Any]) -> None:
    recipe = copy.deepcopy(partials["qwen25_tiny"])
    names = [fiddle.get_callable(one).__name__ for one in recipe.trainer.callbacks]
    assert "passport" in build.leave_gates_out(recipe)
    left = [fiddle.get_callable(one).__name__ for one in recipe.trainer.callbacks]
    assert left == [name for name in names if name != "TruthGates"] != names


def test_the_graph_and_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel: the graph, with overlapped sums if there are two GPUs. Tensor and pipeline parallel: no graph."""
    from types import SimpleNamespace

    from recipes.build.levers import with_speed
    from training.documents import forward_step
    from training.fast import graph

    dual, one, multinode = (
        registry.resolve(name)() for name in ("qwen25_500m_dual", "qwen25_500m_dual", "qwen25_500m_multinode")
    )
    one.trainer.devices = 1
    for recipe, overlapped in ((dual, True), (one, False)):
        with_speed(recipe)
        assert recipe.speed.cuda_graph
        ddp = recipe.trainer.strategy.ddp
        assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather) == (overlapped, overlapped)
    with_speed(multinode)
    assert not multinode.speed.cuda_graph
    assert multinode.trainer.strategy.ddp.overlap_grad_reduce
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for kind in ("pipeline_model", "tensor_model", "context"):
        monkeypatch.setattr(f"megatron.core.parallel_state.get_{kind}_parallel_world_size", lambda: 1)
    config = SimpleNamespace(cross_entropy_fusion_impl="native")
    assert graph.GraphedSchedule.find_problem(config, True, True, True) is None
    isolated = SimpleNamespace(**vars(config), forward_step_fn=forward_step, apply_rope_fusion=False)
    assert graph.GraphedSchedule.find_problem(isolated, True, True, True) is None
    assert "speed.fused_qkv=True" in str(graph.GraphedSchedule.find_problem(isolated, True, True, False))


def test_a_lever_may_change_when_a_run_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine or in another layout other levers are usable, and the training is the same."""
    import yaml

    from launcher import resume
    from recipes.build import levers

    monkeypatch.setattr(levers, "HAVE_TE", True)
    monkeypatch.setattr(levers, "_te_version", lambda: (2, 12))
    monkeypatch.setattr("training.fast.wgrad.is_available", lambda: True)
    monkeypatch.setattr("training.fast.mlp.is_installed", lambda: True)
    recipe = registry.resolve("qwen25_500m_dual")()
    recipe.data.isolate_documents = True
    found = [path for path, _, _ in levers.levers(recipe) if path.startswith("model.config.")]
    assert len(found) == 6
    before = yaml.safe_load((GOLDENS / "qwen25_500m_dual.yaml").read_text())
    for path in found:
        now = copy.deepcopy(before)
        now["model"]["config"][path.rpartition(".")[2]] = "another"
        assert resume.check(before, now, Path("step-5")), path
