"""Stages as a run trains them: exact shares, equal losses after a resume across a switch, another blend on purpose."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from common.rundir import RunDir
from data.budget import Budget
from data.ledger import Ledger, read_ledger
from data.manifest import load_manifest
from tests import fork_server
from tests.conftest import call_in_fork
from tests.training.conftest import SHORT

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
STEPS, SWITCH, TOKENS = 8, 4, 4 * 256
SOUP = "soup/checkpoints/step-8"


def _blend(sample: Path) -> dict[str, Any]:
    return {
        "domains": [
            {"name": "code", "folder": str(sample / "code"), "role": "new"},
            {"name": "prose", "folder": str(sample / "prose"), "role": "replay"},
        ],
        "replay_share": 0.25,
        "stages": [{"name": "main", "until": SWITCH * TOKENS}, {"name": "anneal", "replay_share": 0.5}],
    }


def _train(sample: Path) -> None:
    from common.spec import RunSpec
    from launcher import launch

    Path("blend.json").write_text(json.dumps(_blend(sample)))
    words: tuple[str, ...] = (*SHORT, "data.paths=None", "data.blend=blend.json", "log.ckpt.keep_last=9")
    words += (f"trainer.max_steps={STEPS}", "log.ckpt.every_n_train_steps=3", "trainer.limit_val_batches=1")
    words += (f"data.index_mapping_dir={Path.cwd() / 'cache'}",)
    assert launch.launch(RunSpec(recipe="qwen25_tiny", name="run", overrides=words)) == 0


def _launch(*words: str) -> int:
    import launch

    return launch._run(list(words))


@pytest.fixture(scope="module")
def folder(nemo: None, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run of two stages, with checkpoints before and after the switch."""
    folder = tmp_path_factory.mktemp("stages")
    call_in_fork(_train, sample, cwd=folder)
    return folder


def _losses(run: RunDir) -> list[float]:
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def _tokens(ledger: Ledger) -> dict[tuple[str, int, str], int]:
    return {(one.stage, one.attempt, one.corpus): one.samples * ledger.seq_length for one in ledger.ranges()}


def test_the_shares_of_each_stage(folder: Path) -> None:
    """The ledger, the ranks' own count and blend.json say the same."""
    run = RunDir("run", folder / "runs")
    ledger = read_ledger(run.ledger)
    main, anneal = SWITCH * TOKENS, (STEPS - SWITCH) * TOKENS
    assert _tokens(ledger) == {
        ("main", 1, "code"): main * 3 // 4,
        ("main", 1, "prose"): main // 4,
        ("anneal", 1, "code"): anneal // 2,
        ("anneal", 1, "prose"): anneal // 2,
    }
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert last["consumed_tokens"] == {name: count * 256 for name, count in ledger.read.items()}
    planned = json.loads(run.blend.read_text())
    assert {d["name"]: d["tokens_planned"] for d in planned["domains"]} == last["consumed_tokens"]
    assert "changed_at_step" not in planned
    assert read_ledger(run.checkpoints / "step-3/run/ledger.json").step == 3


def _documents_read() -> list[dict[str, Any]]:
    from data.documents_read import count_run

    return count_run(RunDir("run"))


def test_the_documents_that_were_read(folder: Path, sample: Path) -> None:
    """By stage and attempt as many tokens as the ledger has; a corpus that is another one by now is refused."""
    ledger = read_ledger(RunDir("run", folder / "runs").ledger)
    rows = call_in_fork(_documents_read, cwd=folder)
    by_stage = {(row["stage"], row["attempt"], row["domain"]): row["tokens"] for row in rows if row["attempt"]}
    assert by_stage == _tokens(ledger)
    whole = {row["domain"]: (row["documents"], row["tokens"]) for row in rows if row["attempt"] is None}
    documents = {name: load_manifest(sample / name).splits["train"].documents for name in whole}
    assert whole == {name: (documents[name], ledger.read[name] * 256) for name in ("code", "prose")}
    run = RunDir("other", folder / "runs")
    run.path.mkdir()
    corpora = [dataclasses.replace(one, content="of before") for one in ledger.corpora]
    run.ledger.write_text(dataclasses.replace(ledger, corpora=tuple(corpora)).to_json())
    assert call_in_fork(_launch, "data", "documents", "other", cwd=folder) == UserError.exit_code


def test_a_resume_across_the_switch_is_bit_equal(folder: Path) -> None:
    assert call_in_fork(_launch, "resume", "run", "--from", "step-3", "--name", "again", cwd=folder) == 0
    again, run = RunDir("again", folder / "runs"), RunDir("run", folder / "runs")
    assert _losses(again) == _losses(run) and len(_losses(run)) == STEPS
    first, second = read_ledger(run.ledger), read_ledger(again.ledger)
    assert first.read == second.read and first.segments() == second.segments()


def test_two_ranks_go_on_in_the_stage_where_one_was(folder: Path) -> None:
    """Resumed before the switch with two data-parallel ranks: the same samples, and the losses of other sums."""
    options = ("--from", "step-3", "--name", "two", "--executor", "local", "--devices", "2")
    bare = {key: os.environ[key] for key in ("HOME", "HF_HUB_OFFLINE") if key in os.environ}
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "resume", "run", *options],
        cwd=folder,
        env={**bare, "PATH": "/usr/bin:/bin", **fork_server.variables()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    one, two = (RunDir(name, folder / "runs") for name in ("run", "two"))
    assert _losses(two) == pytest.approx(_losses(one), abs=2e-5)  # as in tests/training/distributed
    assert read_ledger(two.ledger).segments() == read_ledger(one.ledger).segments()
    counted = [json.loads(run.metrics.read_text().splitlines()[-1])["consumed_tokens"] for run in (one, two)]
    assert counted[0] == counted[1] == {name: n * 256 for name, n in read_ledger(two.ledger).read.items()}
    assert (two.attempt(1) / "rank-1.log").exists()


def test_a_fork_is_started_in_one_command(folder: Path) -> None:
    """It trains on from the checkpoint, as an attempt of its own in the ledger."""
    assert call_in_fork(_launch, "fork", "run", "6", "branch", "max_steps=7", "--start", cwd=folder) == 0
    run, branch = (RunDir(name, folder / "runs") for name in ("run", "branch"))
    assert _losses(branch) == _losses(run)[:7]
    assert [(one.number, one.first) for one in read_ledger(branch.ledger).attempts] == [(1, 0), (2, 6)]


def test_another_blend_from_here_on(folder: Path) -> None:
    """Refused unless it is meant; then it is recorded, and the ledger goes on where it was."""
    words = ("resume", "run", "--from", "step-6", "--name", "changed", "data.replay_share=0.1")
    stages = f"data.blend={folder / 'other.json'}"
    other = {key: value for key, value in json.loads((folder / "blend.json").read_text()).items() if key != "stages"}
    (folder / "other.json").write_text(json.dumps(other))
    assert call_in_fork(_launch, *words, stages, cwd=folder) == UserError.exit_code
    assert not (folder / "runs/changed").exists()
    assert call_in_fork(_launch, *words, stages, "--change-blend", cwd=folder) == 0
    run = RunDir("changed", folder / "runs")
    ledger = read_ledger(run.ledger)
    assert ledger.stage_at(6).change == "--change-blend at step 6 of attempt 2" and run.spec().change_blend
    tokens = _tokens(ledger)
    assert tokens[("anneal", 1, "prose")] == 2 * TOKENS // 2 and ("all", 2, "code") in tokens
    assert ledger.read == {"code": 12 + 4 + 7, "prose": 4 + 4 + 1}
    assert json.loads(run.blend.read_text())["changed_at_step"] == 6
    _check_report_and_passport(run)


def _check_report_and_passport(run: RunDir) -> None:
    """Both say what was read in each stage, and that the blend was changed."""
    from report.ledger import stage_rows
    from report.passport import make_passport
    from report.read import read_run
    from report.report import write_report

    item = next(item for item in make_passport(run.path).items if item.name == "token ledger")
    assert item.state == "pass" and "changed at step 6" in item.found
    page = write_report(run.path).read_text()
    assert "Stages" in page and "--change-blend at step 6" in page and "The blend was changed at step 6" in page
    rows = [(row.stage, row.first, row.domain, row.tokens, bool(row.change)) for row in stage_rows(read_run(run))]
    assert rows[-4:] == [
        ("anneal", SWITCH, "code", TOKENS, False),
        ("anneal", SWITCH, "prose", TOKENS, False),
        ("all", 6, "code", 7 * 256, True),
        ("all", 6, "prose", 256, True),
    ]


def _merged_tensors(folder: Path) -> list[float]:
    """Largest difference of each tensor of the kept merge from the mean of its two checkpoints."""
    from convert.nemo import NeMoCheckpoint
    from convert.tensor_map import rows

    first, second, merged = (
        NeMoCheckpoint(folder / "runs" / name) for name in ("run/checkpoints/step-6", "run/checkpoints/step-8", SOUP)
    )
    names = [row.megatron for row in rows(merged.arch)]
    means = {name: 0.5 * first.tensor(name) + 0.5 * second.tensor(name) for name in names}
    assert any(not means[name].equal(second.tensor(name)) for name in names)
    return [float((merged.tensor(name) - means[name]).abs().max()) for name in names]


def _make_soup() -> dict[str, float]:
    """Merge the last two checkpoints; the losses that were measured of the newest one."""
    from launcher.merge_run import soup

    return {name: row["loss"] for name, row in soup("run", 2, "uniform", "soup").newest.items()}


def test_a_merge_is_validated_on_the_same_samples(folder: Path) -> None:
    """The newest checkpoint measures what its run measured, to the last bit; the kept merge is a run of its own."""
    run, kept = RunDir("run", folder / "runs"), RunDir("soup", folder / "runs")
    measured = call_in_fork(_make_soup, cwd=folder)
    assert max(call_in_fork(_merged_tensors, folder, cwd=folder)) < 1e-7
    rows = [json.loads(line)["validation"] for line in kept.metrics.read_text().splitlines() if '"validation"' in line]
    first, newest, merged = rows[0]["code"], rows[-2], rows[-1]["code"]
    assert measured == {name: row["loss"] for name, row in newest.items()}
    assert merged["tokens"] == newest["code"]["tokens"] and merged["loss"] != newest["code"]["loss"]
    assert merged["change"] == pytest.approx(merged["loss"] - first["loss"])
    assert sorted(path.name for path in run.path.parent.iterdir() if path.name.startswith(".soup")) == []

    from report.passport import make_passport

    item = next(item for item in make_passport(kept.path).items if item.name == "origin")
    assert item.state == "pass" and "steps 6 (0.500), 8 (0.500)" in item.found
    assert call_in_fork(_launch, "resume", "soup", "max_steps=9", cwd=folder) == UserError.exit_code
    assert (
        call_in_fork(_launch, "convert", "export", str(kept.path), "models/soup", cwd=folder) == 0
    )  # it compares logits
    assert (folder / "models/soup/model.safetensors").is_file()


BUDGET = ("forgetting_budget={'prose': 0.02}", "trainer.val_check_interval=3", "data.num_workers=1")


def _train_with_budget(sample: Path) -> None:
    from common.spec import RunSpec
    from launcher import launch

    blend = {key: value for key, value in _blend(sample).items() if key != "stages"}
    Path("plain.json").write_text(json.dumps(blend))
    words: tuple[str, ...] = (*SHORT, "data.paths=None", "data.blend=plain.json", "log.ckpt.keep_last=9", *BUDGET)
    words += ("trainer.max_steps=12", "log.ckpt.every_n_train_steps=4", "trainer.limit_val_batches=1")
    words += (f"data.index_mapping_dir={Path.cwd() / 'cache'}", "optim.config.lr=0.01", "warmup_steps=0")
    assert launch.launch(RunSpec(recipe="qwen25_tiny", name="steered", overrides=words)) == 0


def _decisions(run: RunDir) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [row["forgetting_budget"] | {"step": row["step"]} for row in rows if "forgetting_budget" in row]


def test_a_budget_moves_the_share_and_a_resume_repeats_it(nemo: None, sample: Path, tmp_path: Path) -> None:
    """With a data worker that reads two steps ahead, resumed between a decision (3) and its first step (5)."""
    call_in_fork(_train_with_budget, sample, cwd=tmp_path)
    run, again = (RunDir(name, tmp_path / "runs") for name in ("steered", "again"))
    decisions = _decisions(run)
    assert [row["step"] for row in decisions] == [0, 3, 6, 9, 12] and "next_share" not in decisions[0]
    assert [row["from_step"] for row in decisions[1:]] == [5, 8, 11, 14]
    shares = [row["share"] for row in decisions]
    assert shares[:2] == [0.25, 0.25] and shares[2] == decisions[1]["next_share"] != 0.25
    assert decisions[1]["next_share"] == Budget({"prose": 0.02}).next_share(0.25, decisions[1]["used"], {"prose": 0.0})
    ledger = read_ledger(run.ledger)
    assert [(stage.first, stage.decided) for stage in ledger.stages] == [(0, None), (5, 3), (8, 6), (11, 9), (14, 12)]
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    last = [row for row in rows if "consumed_tokens" in row][-1]
    assert last["consumed_tokens"] == {name: count * 256 for name, count in ledger.read.items()}  # as the workers read
    assert call_in_fork(_launch, "resume", "steered", "--from", "step-4", "--name", "again", cwd=tmp_path) == 0
    assert _losses(again) == _losses(run) and len(_losses(run)) == 12
    assert _decisions(again) == decisions
    assert read_ledger(again.ledger).segments() == ledger.segments()

    from report.report import write_report

    assert "The forgetting budget" in write_report(run.path).read_text()

    from report.passport import make_passport

    item = next(item for item in make_passport(run.path).items if item.name == "token ledger")
    assert item.state == "pass" and "4 shares decided" in item.found


def _samples_after_a_change(sample: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of the samples of `code` that a plain run has not read, and what a changed run reads of it first."""
    import types

    from torch import distributed

    from data.module import PreparedDataModule

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    blend = {key: value for key, value in _blend(sample).items() if key != "stages"}
    sizes: dict[str, Any] = {"seq_length": 64, "micro_batch_size": 2, "global_batch_size": 8}

    def module(order: str, share: float, **kwargs: Any) -> Any:
        within = {"code": 1.0, "prose": 1.0}
        rows = [{"name": "all", "first": 0, "replay_share": share, "within": within, "order": order}]
        data = PreparedDataModule(blend=blend, index_mapping_dir="cache", stages=rows, **sizes, **kwargs)
        data.trainer = types.SimpleNamespace(global_step=0)
        data.build(40, 40, 1, 1)
        return data

    plain = module("megatron", 0.25)
    ledger = plain.ledger_after(10)
    Path("ledger.json").write_text(ledger.to_json())
    changed = module("ledger", 0.5, ledger="ledger.json", attempt=2)
    read = ledger.read["code"]
    assert (read, ledger.read["prose"]) == (60, 20) and len(changed._train_ds) == 320
    left = [plain._train_ds.datasets[0][number]["tokens"].tolist() for number in range(read, read + 40)]
    rows = [changed._train_ds[number] for number in range(80, 160)]
    return left, [row["tokens"].tolist() for row in rows if row["dataset_id"] == 0]


def test_a_run_in_megatrons_order_can_change_its_blend(sample: Path, forked: Callable[..., Any]) -> None:
    """It reads on in the samples that Megatron has laid out: the next ones, none of those before."""
    left, found = forked(_samples_after_a_change, sample)
    assert found == left and len({tuple(tokens) for tokens in found}) == 40
