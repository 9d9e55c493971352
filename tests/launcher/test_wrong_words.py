"""Wrong words are refused before NeMo is imported, and the printed advice works when it is typed as printed."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import launch as command_line
from common.errors import EXIT_PREFLIGHT, EXIT_USER
from launcher import build

ROOT = Path(__file__).resolve().parents[2]
TINY = "--recipe qwen25_tiny "
CPT = "--recipe qwen25_tiny_cpt "
BIG = "--recipe qwen25_500m "
SLURM = TINY + "--executor slurm --cluster docs/clusters/slurm.yaml "
TP, PP = "trainer.strategy.tensor_model_parallel_size=", "trainer.strategy.pipeline_model_parallel_size="
HEAVY = {"nemo", "nemo_run", "torch", "transformers"}
SCHEDULE = "optim.lr_scheduler."

# the words of a command, and its exit code
USER = (
    "--recipe qwen25_tinny",
    "--recipe nothing-like-it",
    TINY + "--cluster docs/clusters/slurm.yaml --executor slrum",
    TINY + "--executor slurm",
    TINY + "--executor k8s",
    TINY + "--executor k8s --cluster docs/clusters/slurm.yaml",
    TINY + "--executor direct --devices 2",
    TINY + "--executor local --nodes 2",
    TINY + "--executor docker --nodes 2",
    TINY + "--devices 0",
    TINY + "--nodes 0",
    TINY + "--devices -3",
    SLURM + "--nodes 9",
    SLURM + "--name 'my run'",
    TINY + "--name a/b",
    TINY + "trainer.max_steps=0",
    TINY + "trainer.max_steps=many",
    TINY + "max_stepz=5",
    TINY + "trainner.max_steps=5",
    TINY + "trainer.max_stepz=5",
    TINY + "optim.config.weight_decai=0.2",
    TINY + "nothing-like-it",
    TINY + "data.micro_batch_size=0",
    TINY + "trainer.strategy.sequence_parallel=maybe",
    TINY + "model.config.num_layers=0",
    TINY + "model.config.num_layers=-3",
    TINY + "model.config.hidden_size=130",
    TINY + "model.config.num_attention_heads=3",
    TINY + "model.config.num_query_groups=3",
    TINY + "model.config.vocab_size=0",
    TINY + TP + "0",
    TINY + "trainer.strategy.process_group_backend=mpi",
    TINY + SCHEDULE + "kind=cosin",
    TINY + SCHEDULE + "kind=infinite",
    TINY + SCHEDULE + "warmup_steps=5000",
    TINY + SCHEDULE + "min_lr=1.0",
    TINY + SCHEDULE + "fork_step=100",
    TINY + "optim.config.lr=0",
    TINY + "optim.config.lr=-1e-4",
    CPT + "data.replay_share=1.5",
    CPT + "--profile gentel",
    BIG + "--memory-profile balancd",
    BIG + "--memory-profile nothing-like-it",
    TINY + "--env dul",
    TINY + "--env dev+prod",
    TINY + "--tokens many",
    TINY + "--tokens 2B --epochs 1",
    TINY + "--tokens 2M trainer.max_steps=5",
    "--devices 2",
)
PREFLIGHT = (
    TINY + "data.global_batch_size=7",
    TINY + "data.seq_length=128",
    TINY + "--devices 3 " + TP + "2",
    TINY + "--devices 4 data.global_batch_size=16 " + TP + "4",
    TINY + "--devices 3 " + PP + "3",
    TINY + "trainer.strategy.sequence_parallel=True",
    TINY + "trainer.strategy.virtual_pipeline_model_parallel_size=2",
    TINY + "--devices 2 trainer.strategy.context_parallel_size=2",
)


_get_command = functools.cache(typer.main.get_command)  # to build it takes longer than most tests


class Accepted(Exception):
    """The command came to the point where NeMo is imported."""


@pytest.fixture(autouse=True)
def _as_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The project's folder without its runs; the environment and the log handlers are put back."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    before, handlers = dict(os.environ), logging.getLogger().handlers[:]

    def accept(*_: Any, **__: Any) -> None:
        raise Accepted

    monkeypatch.setattr(build, "build", accept)
    monkeypatch.setattr(typer.main, "get_command", _get_command)
    yield
    os.environ.clear()
    os.environ.update(before)
    logging.getLogger().handlers = handlers


def _refuse(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and the first advice."""
    capfd.readouterr()
    before = set(sys.modules)  # of another test of this session
    began = time.process_time()
    code = command_line._run([*words, *(["--dryrun"] if words[0].startswith("-") else [])])
    assert time.process_time() - began < 1
    assert not HEAVY & set(sys.modules) - before, "checked before they are imported"
    assert not Path("runs").exists()
    text = capfd.readouterr().err
    found = re.search(r"do this: (.*)", text)
    assert found, text
    return code, found[1]


def _with_advice(words: list[str], advice: str) -> list[str]:
    """The command as a user types it after reading the advice: up to its first comma or bracket."""
    instead = advice.startswith("did you mean ")
    advice = re.split(r", |\? | \(|\?$", advice.removeprefix("did you mean "))[0]
    changed = list(words)
    if match := re.fullmatch("leave (.*) out", advice):
        return [word for word in words if word not in match[1].split()]
    typed = shlex.split(advice)
    while typed:
        word = typed.pop(0)
        if word.startswith("--"):
            value = [typed.pop(0)] if typed and "=" not in typed[0] and not typed[0].startswith("--") else []
            if word in changed:
                place = changed.index(word)
                changed[place : place + 2] = []
            changed += [word, *value]
        elif "=" in word:
            changed = changed[:-1] if instead else changed
            changed = [one for one in changed if one.split("=")[0] != word.split("=")[0]]
            changed.append(word)
        else:
            changed[-1] = word
    return changed


@pytest.mark.parametrize(
    ("line", "code"), [*((line, EXIT_USER) for line in USER), *((line, EXIT_PREFLIGHT) for line in PREFLIGHT)]
)
def test_refused_with_advice_that_works(line: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    found, advice = _refuse(words, capfd)
    assert found == code, advice
    if "launch.py" in advice:  # a command that lists what there is
        command = shlex.split(re.split(r" (?:lists|shows|explains) |\(|, ", advice)[0])
        assert command_line._run(command[command.index("launch.py") + 1 :]) == 0
        return
    with pytest.raises(Accepted):
        command_line._run([*_with_advice(words, advice), "--dryrun"])


@pytest.mark.parametrize(
    ("line", "problem", "do"),
    (
        ("report mine", "unknown run 'mine'", "did you mean mine-2?"),
        ("passport mime-2", "unknown run 'mime-2'", "did you mean mine-2?"),
        ("resume nothing-like-it", "unknown run", "launch.py list"),
        ("env DUAL", "unknown environment set 'DUAL'", "did you mean dual?"),
        ("env gpu", "unknown environment set 'gpu'", "launch.py env"),
        ("generate models/none hello", "no model in models/none", "convert export RUN models/none"),
        ("generate runs/mine-2 hello", "no model in runs/mine-2", "convert export runs/mine-2 models/mine-2"),
        ("convert export none out", "unknown run 'none'", "launch.py list"),
        ("convert export mine-2 docs", "docs is in use", "another output folder"),
        ("convert import models/qwen25-tiny out", "no Hugging Face model at models/qwen25-tiny", "make demo"),
        ("convert verify models/a models/b", "no Hugging Face model at models/a", "correct the path"),
        ("data prepare none/ --output out --tokenizer t", "no input file matches", "check the path"),
        ("data inspect none", "none is no corpus", "check the path"),
        ("resume mine-2 --name new", "--name is for a new run", "leave --name new out"),
    ),
)
def test_other_commands_refuse_before_they_import(
    line: str, problem: str, do: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("runs/mine-2/checkpoints/step-1/weights").mkdir(parents=True)
    Path("runs/mine-2/checkpoints/step-1/weights/metadata.json").touch()
    Path("models").mkdir()
    before = set(sys.modules)
    began = time.process_time()
    assert command_line._run(shlex.split(line)) == EXIT_USER
    assert time.process_time() - began < 1
    assert not HEAVY & set(sys.modules) - before
    text = capfd.readouterr().err
    assert text.startswith(f"error: {problem}") and do in text.splitlines()[-1], text
    assert "huggingface-cli" not in text and "Warning" not in text


def test_a_set_can_be_exported_and_explained(capfd: pytest.CaptureFixture[str]) -> None:
    """The lines for a shell on standard output, the table on standard error."""
    assert command_line._run(["env", "dual", "--export", "--explain"]) == 0
    shown = capfd.readouterr()
    assert all(line.startswith(("export ", "# export ")) for line in shown.out.splitlines())
    assert "verdict" in shown.err and "--env dual" in shown.err


@pytest.mark.parametrize("command", ["", "train", "resume", "data", "data prepare", "convert", "convert verify", "env"])
def test_help_is_complete(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """-h everywhere, and no summary that is cut off."""
    assert command_line._run([*command.split(), "-h"]) == 0
    assert not re.search(r"\w\.\.\.$", capfd.readouterr().out, re.M)
    assert command_line._run(["--version"]) == 0


def test_there_are_forty() -> None:
    assert len(set(USER + PREFLIGHT)) >= 40
