"""The blend: every wrong description explained, the arithmetic for any numbers, Megatron's order to the sample."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from common.errors import PreflightError, ProjectError, UserError
from data.blend import Blend, Domain, load_blend, parse_blend
from data.blend_math import apportion, count_planned_samples
from data.manifest import SplitFacts, load_manifest
from data.resolve_blend import domain_weights, plan_tokens, resolve_blend, resolve_run_blend

ROOT = Path(__file__).resolve().parents[2]


def _fields(sample: Path, **changes: Any) -> dict[str, Any]:
    code = {"name": "code", "folder": str(sample / "code"), "role": "new"}
    prose = {"name": "prose", "folder": str(sample / "prose"), "role": "replay"}
    return {"domains": [code, prose], "replay_share": 0.25, **changes}


def _domain(sample: Path, at: int, **changes: Any) -> list[dict[str, Any]]:
    domains = _fields(sample)["domains"]
    domains[at].update(changes)
    return domains  # type: ignore[no-any-return]


def _refused(fields: object, *words: str) -> None:
    with pytest.raises(ProjectError) as error:
        resolve_blend(parse_blend(fields), 100_000)
    problem = error.value
    assert problem.expected and problem.found and problem.do
    for word in words:
        assert word in str(problem)


def test_a_good_blend(sample: Path) -> None:
    found = resolve_blend(parse_blend(_fields(sample)), 1_000_000)
    code, prose = found.domains
    assert (code.weight, prose.weight) == (0.75, 0.25)
    assert (code.tokens_planned, prose.tokens_planned) == (750_000, 250_000)
    facts = load_manifest(sample / "prose").splits["train"]
    assert prose.tokens_available == facts.tokens and prose.epochs_planned == 250_000 / facts.tokens
    assert prose.bytes_per_token == facts.text_bytes / facts.tokens
    assert found.tokenizer == sample / "code" / "tokenizer" and found.warnings == ()
    assert found.paths["train"] == ["0.75", str(sample / "code" / "train"), "0.25", str(sample / "prose" / "train")]
    assert found.paths["test"][1::2] == [str(sample / "code" / "test"), str(sample / "prose" / "test")]


@pytest.mark.parametrize(
    ("replay_share", "trained"),
    [(None, {"code": 0.75, "prose": 0.25}), (0.1, {"code": 0.9, "prose": 0.1}), (0.0, {"code": 1.0})],
)
def test_a_run_can_replace_the_replay_share(
    sample: Path, tmp_path: Path, replay_share: float | None, trained: dict[str, float]
) -> None:
    """With 0 nothing is replayed, and the replay domains are still validated."""
    (tmp_path / "blend.json").write_text(json.dumps(_fields(sample)))
    for description in (_fields(sample), str(tmp_path / "blend.json")):
        found, folders = resolve_run_blend(description, replay_share, 10_000)
        assert {domain.name: domain.weight for domain in found.domains} == pytest.approx(trained)
        assert found.total_tokens == 10_000
        assert folders == {"code": str(sample / "code"), "prose": str(sample / "prose")}
    with pytest.raises(UserError, match="nothing is left for the new domains"):
        resolve_run_blend(_fields(sample), 1.0)


def test_a_watched_domain_is_validated_and_never_trained_on(sample: Path, tmp_path: Path) -> None:
    """It has no weight, changes nobody's share, needs validation tokens only, and keeps its role in blend.json."""
    copy = Path(shutil.copytree(sample / "code", tmp_path / "news"))
    _change(copy, split="train")
    watched: dict[str, Any] = {"name": "news", "folder": str(copy), "role": "watch"}
    fields = _fields(sample)
    fields["domains"].insert(0, watched)
    for share, trained in ((None, {"code": 0.75, "prose": 0.25}), (0.0, {"code": 1.0})):
        found, folders = resolve_run_blend(fields, share, 10_000)
        assert {domain.name: domain.weight for domain in found.domains} == trained
        assert list(folders) == ["code", "prose", "news"]
        assert str(copy) not in str(found.paths)
        only = {row["name"]: row["role"] for row in json.loads(found.to_json())["validated_only"]}
        assert only == ({"news": "watch"} if share is None else {"prose": "replay", "news": "watch"})
        assert any("news" in line and "never trained on" in line for line in found.table())
    watched["weight"] = 0
    assert resolve_blend(parse_blend(fields), 10).weights == [0.75, 0.25]
    watched["weight"] = 1
    _refused(fields, "the watched domain news has a weight", "never trained on")
    del watched["weight"]
    _refused({"domains": [watched]}, "the shares do not add up", "watch")
    _change(copy, split="validation")
    _refused(fields, "news has nothing to validate")


def test_domains_that_are_only_validated_need_the_same_tokenizer(sample: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sample / "prose", tmp_path / "copy"))
    _change(copy, fingerprint="0" * 64)
    with pytest.raises(UserError, match="different tokenizers"):
        resolve_run_blend(_fields(sample, domains=_domain(sample, 1, folder=str(copy))), replay_share=0)


def test_json(sample: Path) -> None:
    found = resolve_blend(parse_blend(_fields(sample)), 1_000_001)
    raw = json.loads(found.to_json())
    assert (raw["replay_share"], raw["total_tokens"]) == (0.25, 1_000_001)
    keys = "name role folder weight tokens_available tokens_planned epochs_planned bytes_per_token".split()  # noqa: SIM905
    assert [list(row) for row in raw["domains"]] == [keys, keys]
    assert sum(row["tokens_planned"] for row in raw["domains"]) == 1_000_001


def test_table(sample: Path) -> None:
    lines = resolve_blend(parse_blend(_fields(sample)), 10_000_000).table()
    assert len({len(line) for line in lines[:4]}) == 1 and "25.00%" in lines[2]
    many = [domain.epochs_planned > 4 for domain in resolve_blend(parse_blend(_fields(sample)), 10_000_000).domains]
    assert sum("epochs planned, above 4" in line for line in lines) == sum(many) > 0
    assert all(
        "epochs planned" not in line
        for line in resolve_blend(parse_blend(_fields(sample, epochs_cap=90)), 10**7).table()
    )


def test_files(sample: Path, tmp_path: Path) -> None:
    import yaml

    for name, text in (("b.yaml", yaml.safe_dump(_fields(sample))), ("b.json", json.dumps(_fields(sample)))):
        (tmp_path / name).write_text(text)
        assert load_blend(tmp_path / name) == parse_blend(_fields(sample)) == Blend(**_fields(sample))
    (tmp_path / "broken.yaml").write_text("domains: [")
    for name in ("broken.yaml", "absent.yaml"):
        with pytest.raises(UserError, match="cannot read the blend"):
            load_blend(tmp_path / name)
    python = Domain(name="code", folder=sample / "code", role="new")
    assert resolve_blend(Blend(domains=(python,)), 10).weights == [1.0]


def test_wrong_descriptions(sample: Path) -> None:
    _refused(_fields(sample, replay=0.1), "wrong at replay", "Extra inputs")
    _refused(_fields(sample, replay=0.1), "the keys domains, replay_share")
    _refused(_fields(sample, domains=_domain(sample, 1, wieght=2)), "domains[1].wieght")
    _refused(_fields(sample, domains=_domain(sample, 0, role="old")), "domains[0].role", "'old'")
    _refused(_fields(sample, domains=_domain(sample, 0, weight=0)), "code has a weight of 0", "role: watch")
    _refused(_fields(sample, domains=_domain(sample, 0, weight=-1)), "domains[0].weight", "greater than or equal to 0")
    _refused(_fields(sample, domains=_domain(sample, 1, role="validation")), "domains[1].role", "'watch'")
    _refused(_fields(sample, domains=_domain(sample, 0, weight=math.nan)), "domains[0].weight")
    _refused(_fields(sample, domains=[{"name": "x"}]), "domains[0].folder, domains[0].role")
    _refused(_fields(sample, replay_share=25), "replay_share", "less than or equal to 1")
    _refused(_fields(sample, domains=[]), "domains")
    _refused(["code"], "not a table")
    _refused(_fields(sample, domains=_domain(sample, 1, name="code")), "two domains have the same name", "code")


def test_wrong_shares(sample: Path) -> None:
    only_new, only_replay = _fields(sample)["domains"][:1], _fields(sample)["domains"][1:]
    _refused(_fields(sample, domains=only_new), "a replay share without a replay domain")
    _refused(_fields(sample, replay_share=0), "a replay domain without a share")
    _refused(_fields(sample, replay_share=1), "nothing is left for the new domains")
    _refused(_fields(sample, domains=only_replay), "the shares do not add up")
    assert resolve_blend(parse_blend(_fields(sample, domains=only_replay, replay_share=1)), 10).weights == [1.0]
    twice = [*_fields(sample)["domains"], {"name": "more", "folder": "corpora/more", "role": "new", "weight": 2}]
    with pytest.raises(UserError, match="some new domains have a weight"):
        domain_weights(parse_blend(_fields(sample, domains=twice)), [1, 1, 1])
    with pytest.raises(UserError, match="at least 1 token"):
        resolve_blend(parse_blend(_fields(sample)), 0)


def test_wrong_folders(sample: Path, tmp_path: Path) -> None:
    _refused(_fields(sample, domains=_domain(sample, 0, folder="nowhere")), "nowhere is not a prepared corpus")
    _refused(_fields(sample, domains=_domain(sample, 0, folder=str(tmp_path))), "a folder without manifest.json")
    same = str(sample / "code" / ".." / "prose")
    _refused(
        _fields(sample, domains=_domain(sample, 0, folder=same)), "one folder is in the blend twice", "code, prose"
    )
    copy = Path(shutil.copytree(sample / "prose", tmp_path / "copy"))
    twin = resolve_blend(parse_blend(_fields(sample, domains=_domain(sample, 0, folder=str(copy)))), 10_000)
    assert twin.warnings == ("prose: the same train tokens as code",)
    _change(copy, fingerprint="0" * 64)
    _refused(
        _fields(sample, domains=_domain(sample, 0, folder=str(copy))), "different tokenizers", "000000000000: code"
    )


def _change(folder: Path, fingerprint: str | None = None, split: str = "", tokens: int = 0) -> None:
    manifest = load_manifest(folder)
    if fingerprint:
        manifest = dataclasses.replace(
            manifest, tokenizer=dataclasses.replace(manifest.tokenizer, fingerprint=fingerprint)
        )
    if split:
        empty: SplitFacts = dataclasses.replace(manifest.splits[split], documents=0, tokens=tokens)
        manifest = dataclasses.replace(manifest, splits={**manifest.splits, split: empty})
    manifest.save(folder)


def test_empty_and_broken_splits(sample: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sample / "code", tmp_path / "copy"))
    fields = _fields(sample, domains=_domain(sample, 0, folder=str(copy)))
    _change(copy, split="validation")
    found = resolve_blend(parse_blend(fields), 10_000)
    assert found.paths["validation"][1::2] == [str(sample / "prose" / "validation")]  # an empty one hangs Megatron
    assert found.warnings == ("code: no validation tokens, so its loss is not measured",)
    (copy / "test.idx").unlink()
    with pytest.raises(PreflightError, match=r"test\.idx is missing"):
        resolve_blend(parse_blend(fields), 10_000)
    _change(copy, split="train")
    _refused(fields, "code has nothing to train on")


domain_numbers = st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 10**10)), min_size=1, max_size=6)


@given(
    new=domain_numbers,
    replay=domain_numbers,
    share=st.floats(1e-4, 0.9999),
    total=st.integers(1, 10**12),
    w=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_arithmetic(
    new: list[tuple[float, int]], replay: list[tuple[float, int]], share: float, total: int, w: bool
) -> None:
    """The replay share holds to the token, the weights within each role, and everything adds up."""
    numbers = [*(("new", *row) for row in new), *(("replay", *row) for row in replay)]
    domains = [
        {"name": f"d{i}", "folder": f"f{i}", "role": role, "weight": weight if w else None}
        for i, (role, weight, _) in enumerate(numbers)
    ]
    blend = Blend(domains=domains, replay_share=share)
    weights = domain_weights(blend, [available for *_, available in numbers])
    tokens = plan_tokens(blend, weights, total)
    assert math.isclose(math.fsum(weights), 1.0, rel_tol=1e-12) and all(weight > 0 for weight in weights)
    assert sum(tokens) == total and all(count >= 0 for count in tokens)
    for role, part in (("new", 1 - share), ("replay", share)):
        group = [i for i, row in enumerate(numbers) if row[0] == role]
        assert math.isclose(math.fsum(weights[i] for i in group), part, rel_tol=1e-12)
        assert abs(sum(tokens[i] for i in group) - total * part) <= 1
        raw = [numbers[i][1] if w else numbers[i][2] for i in group]
        for i, one in zip(group, raw, strict=True):
            assert math.isclose(weights[i] / part, one / math.fsum(raw), rel_tol=1e-9)
            assert abs(tokens[i] - total * weights[i]) <= 2


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), total=st.integers(0, 10**15))
def test_apportion(weights: list[float], total: int) -> None:
    found = apportion(weights, total)
    scale = math.fsum(weights)
    assert sum(found) == total
    slack = 1 + total * 1e-12
    assert all(abs(count - total * weight / scale) < slack for count, weight in zip(found, weights, strict=True))


@pytest.fixture(scope="module")
def helpers() -> Any:
    """Megatron-Core's compiled helper, the one that BlendedDataset calls."""
    return pytest.importorskip("megatron.core.datasets.helpers")


@pytest.mark.nemo
@given(weights=st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=20), n=st.integers(0, 3000))
@example(weights=[0.75, 0.25], n=4000)
@example(weights=[1.0, 1.0, 1.0], n=1000)  # ties
@example(weights=[0.1] * 10, n=1000)
@settings(max_examples=150, deadline=None)
def test_megatrons_order(weights: list[float], n: int, helpers: Any) -> None:
    """Equal to the sample, at `n` itself and as the beginning of a longer run."""
    import numpy as np
    from megatron.core.datasets.utils import normalize

    shares = normalize(normalize(weights))  # the builder, then BlendedDataset
    for length in (n, n + 500):
        index, inner = np.zeros(length, dtype=np.int16), np.zeros(length, dtype=np.int64)
        helpers.build_blending_indices(index, inner, shares, len(weights), length, False)
        assert count_planned_samples(weights, n) == np.bincount(index[:n], minlength=len(weights)).tolist()


def test_order_follows_the_share() -> None:
    """Never a whole sample and a half away from the plan, at any step."""
    for n in range(0, 2000, 37):
        new, replay = count_planned_samples([0.75, 0.25], n)
        assert new + replay == n and abs(replay - 0.25 * n) <= 1.5


def test_the_blend_imports_nothing_heavy() -> None:
    code = "import sys; import data.resolve_blend; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {"torch", "nemo", "numpy", "yaml"}.isdisjoint(found.split())
