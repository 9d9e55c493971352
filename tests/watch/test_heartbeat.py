"""Ranks say where they are; rank 0 gathers it; the launcher has the last line. Samples go on whatever a driver does."""

from __future__ import annotations

import logging
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common import rank_states, run_status
from common.errors import DiagnosedError, UserError
from common.json_files import read_json_lines
from common.rank_states import RankState
from common.run_status import Ending, RunStatus, read_status
from common.rundir import RunDir
from launcher.launcher_log import keep_launcher_log
from launcher.outcome import submit_and_record
from training import heartbeat, system_samples
from training.heartbeat import Heartbeat
from training.system_samples import GpuReader, HostReader, SystemSampler


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    folder = RunDir("mine", tmp_path)
    folder.attempt(1).mkdir(parents=True)
    return folder


@pytest.fixture
def beating(run: RunDir) -> Iterator[RunDir]:
    """Two ranks of one run, in this process."""
    status = RunStatus(phase=run_status.IMPORTING, world_size=2, max_steps=100)
    Heartbeat(run, 1, status).start()
    heartbeat.start(run, 0, status)
    yield run
    heartbeat._current = None


def _status(run: RunDir) -> Any:
    found = read_status(run.status)
    assert found is not None
    return found


def _wait_for(condition: Any) -> None:
    for _ in range(100):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within 2 s")


def test_rank_0_gathers_all_ranks(run: RunDir) -> None:
    status = RunStatus(phase=run_status.IMPORTING, world_size=2, max_steps=100)
    one, zero = (Heartbeat(run, rank, status, interval_s=0.02) for rank in (1, 0))
    one.start()
    one.record(step=12)
    zero.start()
    zero.record(phase=run_status.TRAINING, step=13, loss=2.5, step_seconds=0.5)
    _wait_for(lambda: [beat.step for beat in _status(run).ranks] == [13, 12])
    found = _status(run)
    assert (found.phase, found.step, found.loss, found.eta_seconds) == ("training", 13, 2.5, 43.5)
    zero.end(RankState(rank=0, state=rank_states.DONE))
    zero.record(step=14)
    time.sleep(0.1)  # the thread must not write a running state over the final one
    assert [(s.rank, s.state) for s in rank_states.read(run.attempt(1))] == [(0, "done"), (1, "running")]
    assert _status(run).phase == run_status.DONE
    one.end(RankState(rank=1, state=rank_states.DONE))


def test_the_newest_whole_checkpoint_is_named(run: RunDir) -> None:
    for step in (20, 40):
        weights = run.checkpoints / f"step-{step}" / "weights"
        weights.mkdir(parents=True)
        (weights / "metadata.json").write_text("{}")
    (run.checkpoints / "step-40-unfinished").write_text("")
    Heartbeat(run, 0, RunStatus()).start()
    found = _status(run)
    assert found.checkpoint == "step-20"
    assert 0 <= found.updated - found.checkpoint_time < 60


def test_module_functions_do_nothing_without_a_heartbeat(run: RunDir) -> None:
    heartbeat.record(step=1)
    heartbeat.enter_phase(run_status.TRAINING)
    heartbeat.record_metrics({"loss": 1.0})
    heartbeat.end(RankState(rank=3, state=rank_states.FAILED, error="boom"), run.attempt(1))
    assert rank_states.read(run.attempt(1))[0].error == "boom"
    assert not run.status.exists()


def test_a_full_disk_is_logged_once(run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rank_states.RankState, "write", full)
    with caplog.at_level(logging.WARNING, "launch"):
        beat = Heartbeat(run, 0, RunStatus(), interval_s=0.01)
        beat.start()
        time.sleep(0.2)
        beat.end(RankState(rank=0, state=rank_states.DONE))
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1


def test_no_error_silences_a_rank(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    beat, failures = Heartbeat(run, 0, RunStatus(), interval_s=0.01), iter([RuntimeError("a strange file system")])
    complete = beat._complete

    def fail_once(status: RunStatus) -> RunStatus:
        for problem in failures:
            raise problem
        return complete(status)

    beat._complete = fail_once
    with caplog.at_level(logging.WARNING, "launch"):
        beat.start()
        _wait_for(run.status.exists)
    beat.end(RankState(rank=0, state=rank_states.DONE))
    assert any("a strange file system" in record.getMessage() for record in caplog.records)


def test_recording_costs_a_step_nothing(beating: RunDir) -> None:
    start = time.thread_time()
    for step in range(1000):
        heartbeat.enter_phase(run_status.TRAINING)
        heartbeat.record(step=step, step_time=time.time())
    assert (time.thread_time() - start) / 1000 < 200e-6  # 0.5% of a step of 40 ms


# -- the launcher ------------------------------------------------------------------------------------------------------


def _job(run: RunDir, executor: str = "local", wait: bool = True, dryrun: bool = False) -> Any:
    resolved = SimpleNamespace(spec=SimpleNamespace(executor=executor, attempt=1), plan=SimpleNamespace(max_steps=100))
    cluster = SimpleNamespace(wait=wait)
    return SimpleNamespace(
        folder=run, logs=run.attempt(1), resolved=resolved, world_size=2, dryrun=dryrun, cluster=cluster
    )


def _explain(run: RunDir, code: int) -> Ending:
    return Ending(exit_code=code, rank=1, cause="cuda_oom", summary="GPU memory ran out", advice="smaller batch")


@pytest.mark.parametrize(
    ("executor", "wait", "code", "phase"),
    [
        ("local", True, 0, "done"),
        ("local", True, 130, "interrupted"),
        ("local", True, 1, "failed"),
        ("slurm", True, 0, "done"),
        ("slurm", False, 0, "starting"),  # submitted, and left to the queue
        ("slurm", True, 130, "starting"),  # only the following was stopped
        ("slurm", True, 1, "failed"),
    ],
)
def test_the_launcher_writes_start_and_end(run: RunDir, executor: str, wait: bool, code: int, phase: str) -> None:
    weights = run.checkpoints / "step-20" / "weights"
    weights.mkdir(parents=True)
    (weights / "metadata.json").write_text("{}")

    def submit(job: Any) -> int:
        assert (_status(run).phase, _status(run).step) == (run_status.STARTING, 20)  # the run's step, not the attempt's
        return code

    assert submit_and_record(submit, _job(run, executor, wait), _explain) == code
    found = _status(run)
    assert (found.phase, found.max_steps, found.executor) == (phase, 100, executor)
    if phase == "failed":
        assert (found.ending.rank, found.ending.cause, found.ending.advice) == (1, "cuda_oom", "smaller batch")


def test_a_known_failure_in_this_process_is_no_traceback(run: RunDir) -> None:
    def submit(job: Any) -> int:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(DiagnosedError) as caught:
        submit_and_record(submit, _job(run), _explain)
    assert (caught.value.what, caught.value.do) == ("GPU memory ran out", "smaller batch")
    with pytest.raises(RuntimeError):  # nothing is known of it: the traceback is all there is
        submit_and_record(submit, _job(run), lambda run, code: Ending(exit_code=code))


def test_an_explained_error_stays_itself(run: RunDir) -> None:
    def submit(job: Any) -> int:
        raise UserError("no such image", do="docker pull it")

    with pytest.raises(UserError):
        submit_and_record(submit, _job(run), _explain)
    ending = _status(run).ending
    assert (ending.summary, ending.advice, ending.exit_code) == ("no such image", "docker pull it", 2)


def test_a_dry_run_writes_no_status(run: RunDir) -> None:
    assert submit_and_record(lambda job: 0, _job(run, dryrun=True), None) == 0
    assert not run.status.exists()


def test_launcher_lines_are_kept_once_the_ranks_have_a_folder(tmp_path: Path) -> None:
    logger, path = logging.getLogger("launch"), tmp_path / "attempt-1" / "launcher.log"
    before = logger.level
    logger.setLevel(logging.INFO)
    with keep_launcher_log() as kept:
        logger.info("first")
        kept.path = path
        logger.info("second")
        assert not path.parent.exists()
        path.parent.mkdir()
        logger.info("third")
    logger.info("after the launch")
    logger.setLevel(before)
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["first", "second", "third"]


# -- samples -----------------------------------------------------------------------------------------------------------


class FakeNvml(types.ModuleType):
    """A GPU that reports memory, power and one Xid, and refuses the rest as consumer cards do."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_CLOCK_MEM = NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 0  # noqa: N815
    NVML_MEMORY_ERROR_TYPE_CORRECTED = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.pending = [79]

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: Any) -> Any:
            raise self.NVMLError("Not Supported")

        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetIndex": lambda handle: handle,
            "nvmlDeviceGetName": lambda handle: b"H100",
            "nvmlDeviceGetUUID": lambda handle: "GPU-1",
            "nvmlSystemGetDriverVersion": lambda: "550",
            "nvmlSystemGetCudaDriverVersion": lambda: 12040,
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=2**30, total=80 * 2**30, free=79 * 2**30),
            "nvmlDeviceGetPowerUsage": lambda handle: 350_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x24,
            "nvmlEventSetCreate": lambda: 1,
            "nvmlDeviceRegisterEvents": lambda *_: None,
            "nvmlEventSetWait_v2": self._wait,
        }
        return answers.get(name, refuse)

    def _wait(self, events: Any, timeout: int) -> Any:
        if not self.pending:
            raise self.NVMLError("Timeout")
        return SimpleNamespace(device=0, eventData=self.pending.pop())


def test_what_a_gpu_does_not_report_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert GpuReader().read() == [
        {
            "index": 0,
            "name": "H100",
            "memory_used_gib": 1.0,
            "memory_total_gib": 80.0,
            "power_w": 350.0,
            "throttled_by": ["power cap", "software thermal slowdown"],
            "xids": [79],
        }
    ]


def test_a_machine_without_gpus(run: RunDir, tmp_path: Path) -> None:
    RankState(rank=0).write(run.attempt(1))
    sampler, gpus, host = SystemSampler(run, 1), GpuReader(), HostReader(tmp_path)
    sampler.append(gpus, host)
    sampler.append(gpus, host)
    first, second = read_json_lines(run.system_samples())
    assert "gpus" not in first and "network_sent_mb_s" not in first
    assert second["network_sent_mb_s"] >= 0
    assert 0.005 < second["rank_memory_gib"]["0"] < second["host_memory_total_gib"]
    assert second["disk_free_gib"] > 0


def test_a_sample_costs_less_than_half_a_percent(tmp_path: Path) -> None:
    gpus, host = GpuReader(), HostReader(tmp_path)
    start = time.thread_time()
    for _ in range(10):
        host.read({0: 1}), gpus.read()
    assert (time.thread_time() - start) / 10 < 0.005 * system_samples.INTERVAL_S


def test_a_failing_sample_does_not_end_the_thread(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("the driver is gone")

    sampler = SystemSampler(run, 1, interval_s=0.01)
    monkeypatch.setattr(sampler, "append", fail)
    with caplog.at_level(logging.WARNING, "launch"):
        sampler.start()
        _wait_for(lambda: len(calls) > 3)
        monkeypatch.undo()
    assert sum("the driver is gone" in r.getMessage() for r in caplog.records) == 1
    _wait_for(lambda: read_json_lines(run.system_samples()))
    sampler.stop()
