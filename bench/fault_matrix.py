"""The fault matrix: one signal to one process of a small run in one phase; how it ends and what a resume makes of it.

    python -m bench.fault_matrix [--ranks 2] [--targets launcher,rank-1] [--phases step,save] [--signals KILL,TERM]
        [--recipe NAME] [path=value ...]

Each case is a run of qwen25_tiny on the CPU, or of another recipe (on a GPU two runs differ in the last bits, so that
their weights are not compared). The table says how many seconds after the signal the launcher ended and with which exit
code, after how many every process of the run had ended and how many had to be killed, and whether the run, resumed
where it had not finished, has the weights of an undisturbed one. A case in which there was no such process is tried
three times, and then counted as not done; after one that fails, the next ones are done all the same. Exits with 1
unless every case was done and went well; the files of those that went wrong are kept.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from bench.faults import ROOT, DrilledRun, kill, wait_for
from common.json_files import read_json_lines
from common.processes import is_alive

LIMIT_S = 240.0
ORPHANS_S = 60.0  # ranks whose launcher was killed finish their step, save and stop
LEFT_BEHIND_S = 3.0  # after a launcher that ended by itself
FIND_S = 5.0  # for the process to appear once the phase has come
TRIES = 3  # of a case whose process, such as a checkpoint writer, may be gone before it is hit
STEPS, SAVE_EVERY, VALIDATE_EVERY = 18, 6, 7
PHASES = ("start", "step", "save", "validation", "end")
SIGNALS = ("KILL", "TERM", "INT", "STOP")
RIGHT, WRONG, NOT_DONE = "right", "wrong", "not done"
COLUMNS = "process | phase | signal | ended after s | exit code | all gone after s | left behind | resumed | equal"


@dataclass(frozen=True)
class Case:
    """Which process gets which signal in which phase; with STOP, CONT follows after `stop_s` seconds."""

    target: str
    phase: str
    signal: str
    stop_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Args:
        verdict: RIGHT, WRONG or NOT_DONE.
        problem: in words, of a case that was not done or ended with an error.
        ended_s: seconds from the signal until the launcher ended; None if it did not.
        exit_code: the launcher's.
        gone_s: seconds from the signal until the last process of the run ended; None if some had to be killed.
        left: how many had to be killed.
        resumed: the run had to be resumed to finish.
        equal: the losses and the last weights are those of the undisturbed run; None where that is not compared.
    """

    verdict: str
    problem: str = ""
    ended_s: float | None = None
    exit_code: int | None = None
    gone_s: float | None = None
    left: int = 0
    resumed: bool = False
    equal: bool | None = None

    def cells(self) -> list[str]:
        """The columns of the table after the first three."""
        if self.problem:
            return [f"{self.verdict.upper()}: {self.problem}"]
        seconds = ["never" if one is None else f"{one:.1f}" for one in (self.ended_s, self.gone_s)]
        equal = {None: "not compared", True: "yes", False: "NO"}[self.equal]
        code = "HANGS" if self.ended_s is None else str(self.exit_code)
        return [seconds[0], code, seconds[1], str(self.left), "yes" if self.resumed else "not needed", equal]


def reached(run: DrilledRun, phase: str) -> bool:
    """Whether the run is in this phase now."""
    step = run.last_step()
    if phase == "start":
        return bool(run.ranks()) and step == 0
    if phase == "step":
        return SAVE_EVERY < step < STEPS and not run.is_saving()
    if phase == "save":
        return step >= SAVE_EVERY and run.is_saving()
    if phase == "validation":
        rows = read_json_lines(run.run.metrics, last_bytes=1 << 14)
        return bool(rows) and "loss" in rows[-1] and step > 0 and step % VALIDATE_EVERY == 0
    return step >= STEPS


def find_target(run: DrilledRun, target: str, earlier: set[int]) -> int | None:
    """The process to hit; None if there is none in this phase.

    Args:
        earlier: children of rank 0 before the phase began: its data workers.
    """
    if target == "launcher":
        return run.launcher_pid()
    if target == "torchrun":
        return run.torchrun()
    if target.startswith("rank-"):
        return next((state.pid for state in run.ranks() if f"rank-{state.rank}" == target), None)
    children = run.children(0)
    wanted = [pid for pid in children if (pid in earlier) == (target == "worker")]
    return wanted[0] if wanted else None


def do_case(run: DrilledRun, case: Case) -> Outcome:
    """Do one case, and let the run train to its end; what goes wrong in it does not end the matrix."""
    try:
        run.start()
        pid = _reach(run, case)
        outcome = _hit(run, case, pid) if pid is not None else Outcome(NOT_DONE, "no such process in this phase")
        _finish(run)
    except (subprocess.TimeoutExpired, RuntimeError, OSError) as error:
        outcome = Outcome(WRONG, f"{error} (see {run.output[-1]})")
    finally:
        for pid in run.processes():
            kill(pid)
    return outcome


def _reach(run: DrilledRun, case: Case) -> int | None:
    """Wait for the phase; returns the process to hit, or None if there is none."""
    earlier: set[int] = set()
    pid: int | None = None

    def in_phase() -> bool:
        if run.last_step() and not run.is_saving():
            earlier.update(run.children(0))
        return reached(run, case.phase) or run.exit_code() is not None

    def appears() -> bool:
        nonlocal pid
        pid = find_target(run, case.target, earlier)
        return pid is not None or run.exit_code() is not None

    wait_for(in_phase, LIMIT_S)
    wait_for(appears, FIND_S)
    return pid if run.exit_code() is None else None


def _hit(run: DrilledRun, case: Case, pid: int) -> Outcome:
    """Send the signal; wait for the launcher, then for all other processes, and kill what is left."""
    seen, start = run.processes(), time.monotonic()

    def has_ended() -> bool:
        seen.update(run.processes())  # ranks that save start processes
        return run.exit_code() is not None

    kill(pid, getattr(signal, f"SIG{case.signal}"))
    if case.signal == "STOP":
        time.sleep(case.stop_s)
        kill(pid, signal.SIGCONT)
    ended_s = time.monotonic() - start if wait_for(has_ended, LIMIT_S) else None
    code = run.exit_code()

    def are_gone() -> bool:
        seen.update(run.processes())
        return not any(map(is_alive, seen))

    gone = wait_for(are_gone, ORPHANS_S if code == -signal.SIGKILL else LEFT_BEHIND_S)
    gone_s, left = time.monotonic() - start if gone else None, [pid for pid in seen if is_alive(pid)]
    for one in left:
        kill(one)
    verdict = RIGHT if ended_s is not None and gone else WRONG
    return Outcome(verdict, "", ended_s, code, gone_s, len(left), resumed=not run.is_finished)


def _finish(run: DrilledRun) -> None:
    """Wait for the launcher; resume until the run has finished.

    Raises:
        RuntimeError, subprocess.TimeoutExpired: it does not finish.
    """
    for _ in range(4):
        assert run.launcher is not None
        run.launcher.wait(LIMIT_S)
        if run.is_finished:
            return
        run.start()
    raise RuntimeError("the run does not finish")


def compare(run: DrilledRun, undisturbed: DrilledRun, outcome: Outcome) -> Outcome:
    """The outcome with whether the run ended with the losses and the weights of the undisturbed one."""
    if outcome.problem:
        return outcome
    equal = run.weights() == undisturbed.weights() and run.losses() == undisturbed.losses()
    return replace(outcome, equal=equal, verdict=outcome.verdict if equal else WRONG)


def parse_arguments() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--targets", default="")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--stop-s", type=float, default=60.0, help="seconds between STOP and CONT")
    parser.add_argument("--recipe", default="qwen25_tiny")
    parser.add_argument("overrides", nargs="*", help="path=value")
    return parser.parse_intermixed_args()


def choose_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that the options ask for, without those in which there can be no such process."""
    targets = ["launcher", "worker", "writer"]
    targets += ["torchrun", *(f"rank-{rank}" for rank in range(options.ranks))] if options.ranks > 1 else []
    return [
        Case(target, phase, name, options.stop_s)
        for target in (options.targets.split(",") if options.targets else targets)
        for phase in options.phases.split(",")
        for name in options.signals.split(",")
        if (target, phase) != ("worker", "start") and (target != "writer" or phase in ("save", "end"))
    ]


def run_matrix(folder: Path, options: argparse.Namespace) -> bool:
    """Do the cases and print the table; True if every case was done and went well."""
    command = [sys.executable, str(ROOT / "launch.py"), "data", "sample", "--output", str(folder / "corpora")]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    words = [f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", f"--devices={options.ranks}"]
    words += [f"trainer.val_check_interval={VALIDATE_EVERY}", f"log.ckpt.every_n_train_steps={SAVE_EVERY}"]
    words += ["data.num_workers=1", *options.overrides]
    undisturbed = DrilledRun(folder, folder / "corpora" / "prose", "undisturbed", words, options.recipe)
    on_cpu = options.recipe == DrilledRun.recipe
    if on_cpu:
        undisturbed.start()
        _finish(undisturbed)
    print(f"| {COLUMNS} |\n|{'---|' * len(COLUMNS.split('|'))}")
    counts: Counter[str] = Counter()
    for case in choose_cases(options):
        for number in range(1, TRIES + 1):
            name = f"{case.target}-{case.phase}-{case.signal}-{number}"
            run = replace(undisturbed, name=name, launcher=None, starts=0, output=[])
            outcome = do_case(run, case)
            outcome = compare(run, undisturbed, outcome) if on_cpu else outcome
            if outcome.verdict != WRONG:
                shutil.rmtree(run.run.path, ignore_errors=True)
            if outcome.verdict != NOT_DONE:
                break
        counts[outcome.verdict] += 1
        print("|", " | ".join([case.target, case.phase, case.signal, *outcome.cells()]), "|", flush=True)
    print(f"{counts.total()} cases: " + ", ".join(f"{counts[word]} {word}" for word in (RIGHT, WRONG, NOT_DONE)))
    return counts[RIGHT] == counts.total()


def main() -> int:
    """Read the options and do the cases; returns the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    good = run_matrix(folder, parse_arguments())
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"the runs that did not go well are in {folder}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
