"""Every known failure is found in a sample of its wording, nothing is found in a healthy run, and first causes win."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import run_status
from common.rank_states import DONE, RankState, log_outcome
from common.run_status import Ending
from common.rundir import RunDir
from data.indexed import check_prefix
from launcher.launcher_log import keep_launcher_log
from tests.watch.conftest import START, fail_rank, write_rows
from watch import retry_helps
from watch.diagnose import diagnose, explain_failure
from watch.diagnosis import Diagnosis
from watch.flight_recorder import find_stuck_collective
from watch.kernel_log import KernelMessage
from watch.known_failures import KNOWN_FAILURES, find_known
from watch.records import read_records
from watch.signs import find_signs

LOGS = Path(__file__).parent / "logs"
HEALTHY = (LOGS / "healthy.log").read_text()  # of a real run on two ranks
TEXTS = sorted(path.stem for path in LOGS.glob("*.log") if path.stem != "healthy")
NUMBERS = sorted(path.name for path in LOGS.glob("*.jsonl"))
KERNEL = ("host_oom", "gpu_lost")
SLURM = ("preempted", "time_limit", "node_failure", "cancelled")
STARTER = ("segmentation_fault", "bus_error", "killed", "stuck_collective")
Make = Callable[..., RunDir]


def _diagnose(run: RunDir, kernel: list[str] | None = None, **fields: Any) -> Diagnosis:
    messages = [KernelMessage(START + 50, text) for text in kernel or []]
    return diagnose(run, kernel=messages, now=START + 100, **{"exit_code": 1, **fields})


def test_a_bus_error_names_the_file_that_was_cut_off(make_run: Make, sample: Path, tmp_path: Path) -> None:
    run = make_run()
    corpus = shutil.copytree(sample / "prose", tmp_path / "corpus")
    os.truncate(corpus / "train.bin", 4096)
    run.data.write_text(json.dumps({"corpus": {"absolute_path": str(corpus)}}))
    RankState(rank=1, host="node-b", step=40).write(run.attempt(1))
    (run.attempt(1) / "torchrun").mkdir()
    (run.attempt(1) / "torchrun" / "stderr.log").write_text((LOGS / "bus_error.log").read_text())
    found = _diagnose(run)
    assert found.cause == "bus_error" and f"{corpus}/train.bin is cut short" in found.summary


@pytest.mark.parametrize(
    ("number", "cause", "can_retry"),
    [
        (signal.SIGSEGV, "segmentation_fault", True),
        (signal.SIGBUS, "bus_error", False),
        (signal.SIGABRT, "crashed", True),
        (signal.SIGKILL, "killed", True),
    ],
)
@pytest.mark.parametrize("dump", [True, False])
def test_how_the_rank_of_a_direct_run_died(
    number: signal.Signals, cause: str, can_retry: bool, dump: bool, make_run: Make
) -> None:
    """Its standard error is in rank.log; without a fault handler only the launcher knows the signal."""
    run = make_run(world_size=1)
    logs = run.attempt(1)
    RankState(rank=0, step=40).write(logs)
    faults = {signal.SIGSEGV: "Segmentation fault", signal.SIGBUS: "Bus error", signal.SIGABRT: "Aborted"}
    lines = [f"Fatal Python error: {faults[number]}", ""] if dump and number in faults else ["a line"]
    (logs / "rank.log").write_text("\n".join([*lines, *(f'  File "a.py", line {n} in f' for n in range(60))]))
    with keep_launcher_log() as launcher_log:
        launcher_log.path = logs / "launcher.log"
        assert log_outcome(logs, 1, logs / "rank.log", -number) == 1
    assert (lines[0] in (logs / "launcher.log").read_text()) == (dump and number in faults)
    found = _diagnose(run)
    assert (found.cause, found.can_retry, found.signal, found.rank) == (cause, can_retry, number.name, 0)
    if dump and cause in ("segmentation_fault", "bus_error"):
        assert (Path(found.evidence[0].file).name, found.evidence[0].line) == ("rank.log", 1)


@pytest.mark.parametrize(
    ("name", "damage"), [("train.bin", 4096), ("train.idx", 60), ("train.idx", 9), ("train.bin", 0)]
)
def test_a_corpus_that_the_checks_refuse_is_known(
    name: str, damage: int, make_run: Make, sample: Path, tmp_path: Path
) -> None:
    """The message is the one that the check raises."""
    corpus = shutil.copytree(sample / "prose", tmp_path / "corpus")
    os.truncate(corpus / name, damage)
    (problem,) = check_prefix(corpus / "train")
    run = make_run()
    fail_rank(run, 0, problem.explain())
    found = _diagnose(run)
    assert (found.cause, found.can_retry) == ("corrupt_data", False) and str(corpus / name) in found.summary


def test_every_entry_has_a_sample() -> None:
    assert sorted(failure.name for failure in KNOWN_FAILURES) == TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_known_failure(name: str, make_run: Make) -> None:
    """Where such a text stands in a real run: in a rank's error, the starter's log, Slurm's log, or the kernel's."""
    run, text, kernel = make_run(), (LOGS / f"{name}.log").read_text(), []
    (run.attempt(1) / "rank-0.log").write_text(HEALTHY)
    RankState(rank=0, state=DONE).write(run.attempt(1))
    if name in KERNEL:
        RankState(rank=1, host="node-b", step=40).write(run.attempt(1))
        kernel = text.splitlines()
    elif name in SLURM:
        (run.path / "slurm").mkdir()
        (run.path / "slurm" / "log-mine_1_0.out").write_text(text)
    elif name in STARTER:
        RankState(rank=1, host="node-b", step=40).write(run.attempt(1))
        (run.attempt(1) / "torchrun").mkdir()
        (run.attempt(1) / "torchrun" / "stderr.log").write_text(text)
    else:
        fail_rank(run, 1, text.strip())
    found = _diagnose(run, kernel)
    entry = next(one for one in KNOWN_FAILURES if one.name == name)
    assert (found.cause, found.can_retry, found.state) == (name, entry.can_retry, run_status.FAILED)
    assert found.summary and found.advice
    assert not re.search(r"[{}\[\]]|\?$|: \?", found.summary), found.summary
    assert "{" not in found.advice.replace("{mem: ...}", ""), found.advice
    assert found.evidence[0].text.strip() in text
    if name not in KERNEL:
        line = Path(found.evidence[0].file).read_text().splitlines()[found.evidence[0].line - 1]
        assert found.evidence[0].text in line
    if name not in SLURM:
        assert found.rank == 1


@pytest.mark.parametrize("file", NUMBERS)
def test_numbers_that_are_wrong(file: str, make_run: Make) -> None:
    """Losses, gradients, rates and samples that say something, found by their names."""
    name, kind, _ = file.split(".")
    name = {"ecc_counter": "ecc", "oom_counter": "host_oom"}.get(name, name)
    run = make_run(step=41, step_seconds=0.4, tokens_per_second=1900.0 if name == "slow" else 5200.0)
    shutil.copy(LOGS / file, run.path / f"{kind}.jsonl")
    signs = find_signs(read_records(run), START + 61)
    also = ["loss_spike"] if name == "zero_gradient" else []  # a damaged checkpoint does both
    assert [sign.name for sign in signs] == [name, *also]
    assert signs[0].text and signs[0].advice


def test_a_silent_rank_is_a_sign(make_run: Make) -> None:
    """The others still give signs of life; a rank that has ended is not silent."""
    run = make_run(updated=START + 200, world_size=3)
    for rank, time in ((0, START + 200), (1, START + 100)):
        RankState(rank=rank, host="node-b", phase="training", step=40, time=time).write(run.attempt(1))
    RankState(rank=2, state=DONE, step=40, time=START + 1).write(run.attempt(1))
    (sign,) = find_signs(read_records(run), START + 201)
    assert (sign.name, sign.fatal) == ("silent_rank", True)
    assert "rank 1 on node-b has given no sign of life for 101 s" in sign.text


def test_a_healthy_run_has_no_cause(make_run: Make) -> None:
    run = make_run(phase=run_status.DONE, step=200, checkpoint="step-200", ending=Ending())
    for rank in (0, 1):
        RankState(rank=rank, state=DONE, step=200).write(run.attempt(1))
        (run.attempt(1) / f"rank-{rank}.log").write_text(HEALTHY)
    (run.attempt(1) / "launcher.log").write_text(HEALTHY)
    rows = [json.loads(line) for line in (LOGS / "loss_spike.metrics.jsonl").read_text().splitlines()]
    write_rows(run.metrics, rows[:-1])
    samples = [json.loads(line) for line in (LOGS / "xid.system.jsonl").read_text().splitlines()]
    write_rows(run.system_samples(), samples[:-1])
    found = _diagnose(run, exit_code=None)
    assert (found.cause, found.state, found.notes) == ("", "done", ())
    assert "nothing wrong" in found.to_text()


def test_no_entry_fits_a_warning_with_which_runs_go_on() -> None:
    """Of a container whose name does not resolve; a killed rank in it was diagnosed as that."""
    address = "Unable to resolve hostname to a (local) address. Using the loopback address as fallback."
    assert find_known(f"[W1122 14:34:51.386 ProcessGroupGloo.cpp:524] Warning: {address} Manually set") is None


def test_no_entry_fits_a_healthy_log() -> None:
    """Each entry, also those that stand behind another one."""
    assert [failure.name for failure in KNOWN_FAILURES if failure.search(HEALTHY)] == []


def test_no_exact_entry_fits_the_sample_of_another() -> None:
    """The order of the table decides only among entries that are meant to overlap."""
    overlap = {("shared_memory", "disk_full"), ("host_name", "gloo_interface")}
    for name in TEXTS:
        text = (LOGS / f"{name}.log").read_text()
        fits = {one.name for one in KNOWN_FAILURES if one.search(text) and not one.is_consequence} - {name}
        assert all((name, other) in overlap for other in fits), (name, fits)


def test_out_of_memory_names_the_batch_that_fits(make_run: Make) -> None:
    batch = ("data.micro_batch_size=32", "data.global_batch_size=128")
    run = make_run(recipe="qwen25_500m", overrides=batch)
    fail_rank(run, 0, (LOGS / "cuda_oom.log").read_text().strip())
    found = _diagnose(run)
    assert "4.64 GiB more were asked for" in found.summary and "1.25 GiB of 79.11 GiB were free" in found.summary
    size = re.search(r"data\.micro_batch_size=(\d+)", found.advice)
    assert size is not None and 1 <= int(size[1]) < 32 and 128 % int(size[1]) == 0
    assert "global batch stays 128" in found.advice


def test_divergence_names_step_rate_and_last_good_loss(make_run: Make) -> None:
    run = make_run(recipe="qwen25_tiny", overrides=("optim.config.lr=1e6",), step=1, max_steps=400, world_size=1)
    fail_rank(run, 0, (LOGS / "diverged.log").read_text().strip())
    write_rows(run.metrics, [{"step": 1, "loss": 8.35, "lr": 1e5, "time": START + 1}])
    found = _diagnose(run)
    assert re.search(r"nan in step 2 at a learning rate of [\d.e+]+ \(peak 1e\+06\)", found.summary)
    assert "8.35 in step 1" in found.summary
    assert "optim.config.lr=0.0001" in found.advice
    assert found.can_retry is False


def test_the_first_failure_wins_over_its_consequences(make_run: Make) -> None:
    """Rank 0 fails first in time, but only because rank 1 is gone; rank 1 says why a moment later."""
    run = make_run()
    fail_rank(run, 0, (LOGS / "peer_lost.log").read_text().strip(), time=START + 10)
    fail_rank(run, 1, (LOGS / "cuda_oom.log").read_text().strip(), time=START + 12)
    found = _diagnose(run)
    assert (found.cause, found.rank, found.host) == ("cuda_oom", 1, "node-b")
    assert any(note.startswith("rank 0 then: lost rank 1") for note in found.notes)


def test_an_unknown_error_is_not_replaced_by_a_warning_elsewhere(make_run: Make) -> None:
    run = make_run()
    error = "Traceback (most recent call last):\n  File \"x.py\", line 1, in f\nKeyError: 'planet'"
    fail_rank(run, 1, error)
    (run.attempt(1) / "rank-0.log").write_text("wandb.errors.UsageError: api_key not configured (no-tty)\n")
    found = _diagnose(run)
    assert (found.cause, found.summary, found.can_retry, found.is_known) == (
        "unknown",
        "KeyError: 'planet'",
        None,
        False,
    )
    assert found.evidence[0].file.endswith("rank-1.log") and found.evidence[0].line == 5


def test_an_error_of_this_project_keeps_its_own_advice(make_run: Make) -> None:
    run = make_run()
    fail_rank(run, 0, "the loss mask is wrong\n  expected: 1\n     found: 0\n   do this: leave data.dataset_cls alone")
    found = _diagnose(run)
    assert (found.cause, found.summary) == ("explained", "the loss mask is wrong")
    assert (found.advice, found.can_retry) == ("leave data.dataset_cls alone", False)


def test_a_killed_rank_is_found_behind_the_ranks_that_lost_it(make_run: Make) -> None:
    run = make_run()
    fail_rank(run, 0, (LOGS / "peer_lost.log").read_text().strip())
    RankState(rank=1, host="node-b", step=39).write(run.attempt(1))
    found = _diagnose(run)
    assert (found.cause, found.rank, found.host, found.can_retry) == ("killed", 1, "node-b", True)
    assert "in step 39" in found.summary


def test_a_killed_rank_with_a_grown_oom_counter_was_out_of_memory(make_run: Make) -> None:
    run = make_run()
    RankState(rank=1, host="node-b", step=39).write(run.attempt(1))
    shutil.copy(LOGS / "oom_counter.system.jsonl", run.system_samples())
    assert _diagnose(run).cause == "host_oom"


def test_the_kernel_log_of_another_time_or_machine_is_not_evidence(
    make_run: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(phase=run_status.FAILED)
    RankState(rank=0, step=39).write(run.attempt(1))  # on this host
    text = (LOGS / "host_oom.log").read_text().splitlines()[-1]
    for time, cause in ((START - 10, "killed"), (START + 30, "host_oom"), (START + 9000, "killed")):
        monkeypatch.setattr("watch.case.read_kernel_messages", lambda t=time: [KernelMessage(t, text)])
        assert diagnose(run, exit_code=1, now=START + 100).cause == cause


def test_the_launchers_own_diagnosis_is_not_evidence(make_run: Make) -> None:
    run = make_run()
    RankState(rank=1, step=39).write(run.attempt(1))
    (run.attempt(1) / "launcher.log").write_text("10:00 ERROR launch: diagnosis: CUDA out of memory. \n")
    assert _diagnose(run).cause == "killed"


def test_the_same_cause_twice_is_said(make_run: Make) -> None:
    run = make_run(attempt=2)
    fail_rank(run, 1, (LOGS / "port_in_use.log").read_text().strip())
    shutil.copytree(run.attempt(1), run.attempt(2))
    assert any("the same cause" in note for note in _diagnose(run).notes)


def test_a_hang_is_found_while_it_runs(make_run: Make) -> None:
    run = make_run(updated=START + 2000, step_seconds=0.4)
    for rank, step in ((0, 41), (1, 40)):
        RankState(rank=rank, host="node-a", phase="training", step=step, time=START + 1990, step_time=START + 20).write(
            run.attempt(1)
        )
    shutil.copy(LOGS / "loss_spike.metrics.jsonl", run.metrics)
    found = diagnose(run, kernel=[], now=START + 2000)
    assert found.cause == "no_step"
    assert "furthest behind is rank 1" in found.summary


def test_a_run_that_was_killed_whole_is_silent(make_run: Make) -> None:
    run = make_run()
    for rank in (0, 1):
        RankState(rank=rank, host="node-a", step=40, time=START + 60).write(run.attempt(1))
    found = diagnose(run, kernel=[], now=START + 7200)
    assert (found.state, found.cause) == ("silent", "killed")
    assert "rank 0, 1 ended without an error" in found.summary


def _entry(number: int, state: str, name: str = "nccl:all_reduce") -> dict[str, Any]:
    return {"process_group": ("0", "default_pg"), "collective_seq_id": number, "state": state, "profiling_name": name}


def test_flight_recorder_names_the_rank_that_did_not_come(make_run: Make) -> None:
    run = make_run()
    fail_rank(run, 0, (LOGS / "stuck_collective.log").read_text().strip())
    RankState(rank=1, state="failed", error="Timed out waiting 600000ms for recv operation to complete").write(
        run.attempt(1)
    )
    done = [_entry(n, "completed") for n in range(5)]
    for rank, entries in ((0, [*done, _entry(5, "started")]), (1, done)):
        (run.attempt(1) / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps({"version": "2.4", "entries": entries}))
    found = _diagnose(run)
    assert found.cause == "stuck_collective"
    assert "nccl:all_reduce number 5 of group 0:default_pg: rank 0 waited, rank 1 did not come to it" in found.summary
    assert "the log of rank 1" in found.advice


def test_a_dump_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert find_stuck_collective({0: path}) is None
    assert not (tmp_path / "ran").exists()


def test_the_launcher_gets_an_ending_whatever_happens(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    fail_rank(run, 1, (LOGS / "cuda_oom.log").read_text().strip())
    ending = explain_failure(run, 1)
    assert (ending.rank, ending.cause, ending.can_retry, ending.exit_code) == (1, "cuda_oom", False, 1)
    monkeypatch.setattr("watch.diagnose.read_records", lambda run: 1 / 0)
    assert "diagnosis itself failed" in explain_failure(run, 1).summary


def test_a_run_directory_without_anything(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    found = diagnose(RunDir("empty", tmp_path), kernel=[], now=START)
    assert found.cause == "" and json.loads(found.to_json())["run"].endswith("empty")


def test_groups_without_a_value_leave_no_hole() -> None:
    match = find_known("RuntimeError: CUDA error: out of memory")
    assert match is not None and match.cause == "GPU memory ran out"


@pytest.mark.parametrize(
    ("error", "rank_code", "code", "says"),
    [
        ("diverged", 1, 1, "the training diverged"),
        ("port_in_use", 1, 1, ""),
        ("something unknown", 1, 1, ""),
        ("something unknown", 3, 1, "ended with code 3: something unknown"),  # torchrun and srun hide it
        ("", 0, 2, "ended with code 2"),
    ],
)
def test_whether_a_scheduler_shall_start_it_again(
    error: str, rank_code: int, code: int, says: str, make_run: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(executor="slurm")
    if error:
        sample = LOGS / f"{error}.log"
        text = sample.read_text().strip() if sample.exists() else error
        RankState(rank=0, state="failed", exit_code=rank_code, error=text).write(run.attempt(1))
    assert retry_helps.main([str(run.path), str(code)]) == (4 if says else 0)
    assert says in capsys.readouterr().err
