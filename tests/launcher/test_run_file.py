"""`--config FILE.yaml`: read strictly, overridden by the command line, written back by every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UserError
from common.spec import RunSpec
from launcher import run_file
from recipes.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_resolve(path: Path) -> None:
    spec = run_file.load(path)
    plan = resolve(spec).plan
    assert plan.max_steps > 0 and len(spec.overrides) >= 1


def test_what_is_written_back_repeats_the_run(tmp_path: Path) -> None:
    spec = RunSpec(
        recipe="qwen25_500m_cpt",
        name="r",
        profile="wsd",
        tokens=10**9,
        gates=False,
        overrides=("data.micro_batch_size=4", "data.blend={'domains': [{'name': 'a'}]}", "data.eod_mask_loss=True"),
    )
    file = tmp_path / "run.yaml"
    file.write_text(run_file.dump(spec))
    assert run_file.load(file) == spec


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("recipe: qwen25_tiny\nname: a\ntokens: 2M\noverrides: {trainer.max_steps: 7, data.seed: 3}\n")
    described = run_file.load(file)
    assert described.tokens == 2_000_000 and described.overrides == ("trainer.max_steps=7", "data.seed=3")
    merged = run_file.merge(described, {"name": "b", "recipe": None}, ("trainer.max_steps=9",))
    assert (merged.recipe, merged.name) == ("qwen25_tiny", "b")
    assert merged.overrides[-1] == "trainer.max_steps=9"
    with pytest.raises(UserError, match="no recipe is named"):
        run_file.merge(RunSpec(recipe=""), {"recipe": None}, ())


@pytest.mark.parametrize(
    ("text", "found"),
    (
        ("recipe: [1]", "recipe"),
        ("recipes: qwen25_tiny", "recipes"),
        ("overrides: [a]", "overrides"),
        ("tokens: many", "--tokens"),
        (":\n -", "cannot read"),
        ("[1, 2]", "wrong"),
    ),
)
def test_wrong_files(text: str, found: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=found) as error:
        run_file.load(file)
    assert error.value.do
    with pytest.raises(UserError, match="cannot read the run file"):
        run_file.load(tmp_path / "none.yaml")
