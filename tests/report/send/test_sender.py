"""What is sent of a run, and that no service can lose it a number or stop it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import UserError
from common.loggers import PACKAGES, parse_loggers
from common.run_status import DONE, TRAINING, RunStatus
from common.rundir import RunDir
from launcher.sending import environment_of_senders, sending
from recipes import limits, overrides, registry
from report.send.__main__ import End
from report.send.open_service import open_service
from report.send.rows import Point, read_configuration, read_new_points
from report.send.sender import Sender
from report.send.service import Sent
from report.send.wandb_service import has_key

ROOT = Path(__file__).resolve().parents[3]
TRAIN = {"step": 2, "loss": 1.25, "grad_norm": None, "consumed_tokens": {"pro:se": 7}, "note": "text", "time": 5.5}
VALIDATION = {
    "step": 2,
    "time": 6.0,
    "val_loss": 1.5,
    "seconds": 0.5,
    "validation": {"prose": {"loss": 1.5, "tokens": 9}},
}


class Recorder:
    """A service in memory, which fails as often as it is told to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.points, self.opened, self.finished = failures, list[Point](), 0, list[Any]()

    def _fail(self) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectionError("no route\nto host")

    def open(self, run: RunDir, sent: Sent, configuration: dict[str, Any]) -> str:
        self._fail()
        self.opened += 1
        sent.id = sent.id or "one"
        return f"open {sent.id}"

    def log(self, points: Sequence[Point]) -> None:
        self._fail()
        self.points += points

    def finish(self, phase: str, files: Sequence[Path]) -> str:
        self._fail()
        self.finished.append((phase, [file.name for file in files]))
        return ""


class Clock:
    """Runs for `looks` looks at it, an hour apart; the run's file gets a line before each."""

    def __init__(self, run: RunDir, looks: int) -> None:
        self.run, self.looks, self.hours = run, looks, 0.0

    def is_over(self) -> bool:
        self.hours += 1
        self.looks -= 1
        if self.looks >= 0:
            with self.run.metrics.open("a") as file:
                file.write(json.dumps({**TRAIN, "step": int(self.hours)}) + "\n")
        return self.looks < 0

    def now(self) -> float:
        return 3600 * self.hours


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir("a", tmp_path)
    folder.path.mkdir()
    RunStatus(phase=DONE, attempt=2).write(folder.status)
    folder.metrics.write_text("")
    (folder.path / "report.html").write_text("page")
    os.utime(folder.path / "report.html", (2e9, 2e9))  # newer than all else: it is not written again
    return folder


def _send(run: RunDir, service: Recorder, looks: int, said: list[str]) -> bool:
    clock = Clock(run, looks)
    sender = Sender(run, "wandb", service, lambda level, line: said.append(f"{level} {line}"), clock.now)
    return sender.follow(clock.is_over, interval_s=0.0)


def test_a_line_is_sent_as_it_is_written(run: RunDir) -> None:
    run.metrics.write_text(f"{json.dumps(TRAIN)}\n{json.dumps(VALIDATION)}\nbroken\n" + '{"step": 3, "lo')
    points, offset = read_new_points(run.metrics, 0)
    assert points[0] == Point(2, 5.5, {"train/loss": 1.25, "train/consumed_tokens/pro_se": 7})
    assert points[1] == Point(
        2, 6.0, {"val/loss": 1.5, "val/seconds": 0.5, "val/prose/loss": 1.5, "val/prose/tokens": 9}
    )
    with run.metrics.open("a") as file:
        file.write('ss": NaN}\n{"step": 4, "evaluation": {"cloze/acc": 0.5}}\n')
    later, end = read_new_points(run.metrics, offset)
    assert later[1].numbers == {"evaluation/cloze/acc": 0.5}
    assert str(later[0].numbers) == "{'train/loss': nan}" and end == run.metrics.stat().st_size
    assert read_new_points(run.path / "absent", 0) == ([], 0)


def test_every_line_once_while_the_run_goes_on_and_the_report_at_the_end(run: RunDir) -> None:
    service, said = Recorder(), list[str]()
    assert _send(run, service, 3, said)
    assert [point.step for point in service.points] == [1, 2, 3]
    assert service.finished == [(DONE, ["report.html", "metrics.jsonl"])] and said == ["INFO open one"]
    again = Recorder()  # a resumed run: the same id there, and only what is new
    assert _send(run, again, 1, said)
    assert (len(again.points), Sent.load(run, "wandb").id) == (1, "one")


def test_a_failure_is_said_once_and_nothing_is_lost(run: RunDir) -> None:
    service, said = Recorder(failures=3), list[str]()
    assert _send(run, service, 5, said)
    assert [point.step for point in service.points] == [1, 2, 3, 4, 5]
    assert [line.split()[0] for line in said] == ["WARNING", "INFO", "INFO"]
    assert "the training goes on" in said[0] and "ConnectionError: no route to host" in said[0]


class InRequests(Recorder):
    """Takes 1,000 numbers at a time, as MLflow does; only the first request of each run of three arrives."""

    requests = 0

    def log(self, points: Sequence[Point]) -> None:
        rows = [(point.step, name) for point in points for name in point.numbers]
        for start in range(0, len(rows), 1000):
            self.requests += 1
            if self.requests % 3:
                self.sent += rows[start : start + 1000]
            else:
                raise ConnectionError("reset")

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, str]] = []


def test_what_has_arrived_is_not_sent_again(run: RunDir) -> None:
    """A server that is lost in the middle of a long file, three times."""
    row = {**TRAIN, "consumed_tokens": {f"domain-{number}": number for number in range(40)}}
    run.metrics.write_text("".join(json.dumps({**row, "step": step}) + "\n" for step in range(1001, 1201)))
    service = InRequests()
    _send(run, service, 9, [])
    assert service.requests > 9 and len(service.sent) == len(set(service.sent)) > 8000


def test_a_sender_that_is_killed_costs_the_training_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    (run.path / "logs" / "attempt-1").mkdir(parents=True)
    with sending(run, "wandb", 1):
        (process,) = (one for one in psutil.Process().children() if "report.send" in one.cmdline())
        process.kill()
    assert "its process ended with code -9; send-wandb.log beside this rank's says why" in caplog.text


def test_a_service_that_never_answers(run: RunDir) -> None:
    service, said = Recorder(failures=99), list[str]()
    assert not _send(run, service, 4, said)
    assert len(said) == 2 and "send" in said[1] and "wandb` sends the rest" in said[1]
    assert 99 - service.failures == 5  # four looks an hour apart, and the end
    assert _send(run, Recorder(), 0, said)  # what the printed command does
    assert Sent.load(run, "wandb").bytes == run.metrics.stat().st_size


def test_the_configuration_by_the_paths_of_overrides(run: RunDir) -> None:
    run.config.write_text("optim: {_target_: x.y, config: {lr: 0.1, betas: [1, 2], none: null}}\n")
    run.spec_file.write_text('{"recipe": "qwen25_tiny", "attempt": 2}')
    found = read_configuration(run)
    expected = {"optim.config.lr": 0.1, "optim.config.betas": "[1, 2]", "run.recipe": "qwen25_tiny", "run.attempt": 2}
    assert found == expected


def test_when_an_attempt_has_ended(run: RunDir) -> None:
    assert End(run, 2, os.getpid())()
    assert not End(run, 3, os.getpid())()  # the status is still that of the attempt before
    RunStatus(phase=TRAINING, attempt=3).write(run.status)
    assert not End(run, 3, os.getpid())()
    assert End(run, 3, 2**22 + 1)()  # no such process


def test_no_key_no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 1234\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org:8080")
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "1234")
    assert has_key()


def test_wandb_mode_is_the_users_own(run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    """The environment set's `disabled` is for other libraries; the user's own counts, and is said."""
    rows = [{"key": "WANDB_MODE", "value": "disabled", "source": "base"}]
    assert "WANDB_MODE" not in environment_of_senders({"WANDB_MODE": "disabled"}, rows)
    assert environment_of_senders({"WANDB_MODE": "online"}, rows)["WANDB_MODE"] == "online"  # set on the node
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run.env.write_text(json.dumps([{**rows[0], "source": "user"}]))
    with caplog.at_level("INFO"), sending(run, "wandb", 1):
        pass
    assert [record.message for record in caplog.records] == ["wandb: off, by WANDB_MODE=disabled in your environment"]


def test_unknown_and_missing_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = registry.resolve("qwen25_tiny").plan
    wrong = overrides.apply_to_plan(plan, overrides.parse(["loggers=wandb+mlfow"]))
    problem = next(iter(limits.problems(wrong, plan)))
    assert problem.do == "log.loggers=mlflow" and parse_loggers("wandb,mlflow") == ("wandb", "mlflow")
    with pytest.raises(UserError, match="log.wandb is set by the launcher"):
        overrides.parse(["log.wandb=x"])
    with pytest.raises(UserError, match="unknown logger"):
        open_service("tensorbord")
    monkeypatch.setattr("report.send.open_service.is_installed", lambda name: False)
    with pytest.raises(UserError) as caught:
        open_service("mlflow")
    assert caught.value.do.endswith("pip install 'mlflow-skinny==3.17.2'")


def test_the_advised_packages_are_those_of_the_project() -> None:
    pinned = (ROOT / "constraints.txt").read_text() + (ROOT / "tests/mlflow.txt").read_text()
    assert set(PACKAGES.values()) <= set(pinned.split())
