"""The fault matrix: one signal to one process of a small run in one phase; how it ends and what a resume makes of it.

    python -m bench.fault_matrix [--ranks 2] [--targets launcher,rank-1] [--phases step,save] [--signals KILL,TERM]
        [--recipe NAME] [path=value ...]

Each case is a run of qwen25_tiny on the CPU, or of another recipe (on a GPU two runs differ in the last bits, so that
their weights are not compared). The table says within how many seconds of the signal the launcher ended,
with which exit code, how many processes were left behind three seconds later, and whether the run, resumed where it had
not finished, has the weights of an undisturbed one. Exits with 1 if a process is left or the weights differ.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.faults import ROOT, DrilledRun, kill, wait_for
from common.json_files import read_json_lines, read_json_object
from common.processes import is_alive

LIMIT_S = 240.0
STEPS, SAVE_EVERY, VALIDATE_EVERY = 18, 6, 7
PHASES = ("start", "step", "save", "validation", "end")
SIGNALS = ("KILL", "TERM", "INT", "STOP")


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
    assert run.launcher is not None
    if target == "launcher":
        holder = read_json_object(run.run.path / ".lock-launcher")
        return holder["pid"] if holder and is_alive(holder["pid"]) else run.launcher.pid
    if target == "torchrun":
        found = [p.pid for p in psutil.Process(run.launcher.pid).children(recursive=True) if _is_torchrun(p)]
        return found[0] if found else None
    if target.startswith("rank-"):
        return next((state.pid for state in run.ranks() if f"rank-{state.rank}" == target), None)
    children = run.children(0)
    wanted = [pid for pid in children if (pid in earlier) == (target == "worker")]
    return wanted[0] if wanted else None


def _is_torchrun(process: psutil.Process) -> bool:
    try:
        return any(word.endswith("torchrun") for word in process.cmdline())
    except psutil.Error:
        return False


def run_case(run: DrilledRun, target: str, phase: str, name: str, stop_s: float) -> tuple[str, bool]:
    """Do one case; returns the row of the table without its first columns, and whether it went well."""
    run.start()
    earlier: set[int] = set()

    def in_phase() -> bool:
        if run.last_step() and not run.is_saving():
            earlier.update(run.children(0))
        return reached(run, phase) or run.exit_code() is not None

    wait_for(in_phase, LIMIT_S)
    pid: int | None = None

    def appears() -> bool:
        nonlocal pid
        pid = find_target(run, target, earlier)
        return pid is not None or run.exit_code() is not None

    wait_for(appears, 5)
    if pid is None:
        _finish(run)
        return "no such process", True
    processes, start = run.processes(), time.monotonic()
    kill(pid, getattr(signal, f"SIG{name}"))
    if name == "STOP":
        time.sleep(stop_s)
        kill(pid, signal.SIGCONT)
    ended = wait_for(lambda: run.exit_code() is not None, LIMIT_S)
    seconds, code = time.monotonic() - start, run.exit_code()
    wait_for(lambda: not any(map(is_alive, processes)), 3 if code != -signal.SIGKILL else LIMIT_S)
    left = [pid for pid in processes if is_alive(pid)]
    for pid in left:
        kill(pid)
    if not ended:
        assert run.launcher is not None
        run.launcher.kill()
        run.launcher.wait()
    resumed = "" if run.is_finished else "yes"
    _finish(run)
    return f"{seconds:.0f} | {code if ended else 'HANGS'} | {len(left)} | {resumed or 'not needed'}", ended and not left


def _finish(run: DrilledRun) -> None:
    """Wait for the launcher; resume until the run has finished."""
    for _ in range(4):
        assert run.launcher is not None
        run.launcher.wait(LIMIT_S)
        if run.is_finished:
            return
        run.start()
    raise RuntimeError(f"the run does not finish: see {run.output[-1]}")


def main() -> int:
    """Read the options, do the cases, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--targets", default="")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--stop-s", type=float, default=60.0, help="seconds between STOP and CONT")
    parser.add_argument("--recipe", default="qwen25_tiny")
    parser.add_argument("overrides", nargs="*", help="path=value")
    options = parser.parse_intermixed_args()
    on_cpu = options.recipe == DrilledRun.recipe
    every = ["launcher", "worker", "writer"]
    every += ["torchrun", *(f"rank-{rank}" for rank in range(options.ranks))] if options.ranks > 1 else []
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    command = [sys.executable, str(ROOT / "launch.py"), "data", "sample", "--output", str(folder / "corpora")]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    words = [f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", f"--devices={options.ranks}"]
    words += [f"trainer.val_check_interval={VALIDATE_EVERY}", f"log.ckpt.every_n_train_steps={SAVE_EVERY}"]
    words += ["data.num_workers=1", *options.overrides]
    undisturbed = DrilledRun(folder, folder / "corpora" / "prose", "undisturbed", words, options.recipe)
    if on_cpu:
        undisturbed.start()
        _finish(undisturbed)
    print("| process | phase | signal | ended after s | exit code | left behind | resumed | equal |")
    print("|---|---|---|---|---|---|---|---|")
    good = True
    for target in options.targets.split(",") if options.targets else every:
        for phase in options.phases.split(","):
            for name in options.signals.split(","):
                if (target, phase) == ("worker", "start") or (target == "writer" and phase not in ("save", "end")):
                    continue  # there is no such process yet
                run = DrilledRun(folder, undisturbed.corpus, f"{target}-{phase}-{name}", words, options.recipe)
                row, went_well = run_case(run, target, phase, name, options.stop_s)
                equal = on_cpu and run.weights() == undisturbed.weights() and run.losses() == undisturbed.losses()
                good = good and went_well and (equal or not on_cpu)
                said = "not compared" if not on_cpu else "yes" if equal else "NO"
                print(f"| {target} | {phase} | {name} | {row} | {said} |", flush=True)
                shutil.rmtree(run.run.path)
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
