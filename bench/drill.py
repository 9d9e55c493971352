"""A drill: faults at random moments of a small run, which must end with the weights of an undisturbed one.

    python -m bench.drill [--minutes 5] [--faults 100] [--seed 0] [--ranks 2] [--no-full-disk]

Trains qwen25_tiny on the CPU twice: undisturbed, and with --retries while processes are killed and stopped at random,
files of checkpoints damaged, and the disk filled (the run gets a small one of its own where this user may mount it).
What a retry does not continue, the drill does with `launch.py resume`, as a user would. Prints a table, and exits with
1 if the weights differ.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.faults import ROOT, DrilledRun, flip_bit, kill, wait_for

LIMIT_S = 300.0  # for anything that must happen: longer is a hang
SAVE_EVERY = 5  # steps
UNHURT = 10  # steps of the same attempt after which a fault has ended nothing
STOPPED = "stop a rank for 3 s"  # the one fault that ends no attempt


@dataclass
class Tally:
    """How often a fault was done, and what it took until a new step was trained."""

    seconds: list[float] = field(default_factory=list)
    by_command: int = 0


@dataclass
class Drill:
    """One disturbed run.

    Args:
        disk: a file system of its own for the run, which can be filled; None leaves that fault out.
    """

    run: DrilledRun
    rng: random.Random
    ranks: int
    disk: Path | None
    tallies: dict[str, Tally] = field(default_factory=dict)
    fault: str = "none"

    def faults(self) -> dict[str, Callable[[], bool]]:
        """Name -> what does the fault; False if its moment did not come."""
        found: dict[str, Callable[[], bool]] = {
            "kill a rank": self._kill_rank,
            "kill a rank while it saves": self._kill_saving,
            "kill the checkpoint writer": self._kill_writer,
            "kill a data worker": self._kill_worker,
            "SIGTERM to a rank": lambda: self._signal_rank(signal.SIGTERM),
            "SIGTERM to the launcher": lambda: self._signal_launcher(signal.SIGTERM),
            "SIGHUP to the launcher": lambda: self._signal_launcher(signal.SIGHUP),
            "kill the launcher": lambda: self._signal_launcher(signal.SIGKILL),
            STOPPED: self._stop_rank,
            "flip a bit of the newest checkpoint, kill a rank": self._flip,
        }
        if self.ranks > 1:
            found["kill torchrun"] = self._kill_torchrun
        if self.disk is not None:
            found["fill the disk"] = self._fill_disk
        return found

    def do_one(self) -> None:
        """Do one fault at a random moment and wait until the run trains a new step (or has ended)."""
        step = self.run.last_step()
        if not wait_for(lambda: self.run.last_step() > step or self.run.exit_code() is not None, LIMIT_S):
            raise TimeoutError(f"no step after step {step} within {LIMIT_S:.0f} s")
        time.sleep(self.rng.uniform(0.0, 1.5))
        name = self.rng.choice(list(self.faults()))
        start, step, starts = time.monotonic(), self.run.last_step(), self.run.starts
        attempts = len(self.run.run.attempts)
        self.fault = f"{name}, step {step}"
        if self.run.exit_code() is not None:  # of the fault before: there is nothing to hit until the run is on again
            self.continue_until(lambda: self.run.last_step() > step)
            return
        if not self.faults()[name]():
            return
        if name != STOPPED:  # a child that the run did not need any more may have been hit: then it trains on
            self.continue_until(lambda: len(self.run.run.attempts) > attempts or self.run.last_step() >= step + UNHURT)
        self.continue_until(lambda: self.run.last_step() > step)
        tally = self.tallies.setdefault(name, Tally())
        tally.seconds.append(time.monotonic() - start)
        tally.by_command += self.run.starts > starts
        print(f"{name}: step {step}, on again after {tally.seconds[-1]:.1f} s", flush=True)

    def continue_until(self, condition: Callable[[], bool]) -> None:
        """Wait; start the run again when its launcher has ended."""
        end, step = time.monotonic() + LIMIT_S, self.run.last_step()
        while not (condition() or self.run.is_finished):
            if self.run.last_step() > step:
                end, step = time.monotonic() + LIMIT_S, self.run.last_step()
            if time.monotonic() > end:
                raise TimeoutError(f"the run did not go on within {LIMIT_S:.0f} s:\n{self._describe()}")
            if self.run.exit_code() is not None and not self.run.is_finished:
                wait_for(lambda: not self.run.ranks(), LIMIT_S)  # without a launcher they save and stop
                print(f"  the launcher ended with {self.run.exit_code()}: {self.run.last_words()}", flush=True)
                self.run.start()
            time.sleep(0.1)

    def _describe(self) -> str:
        """What a person needs to know of a run that does not go on."""
        processes = [f"{p.pid} {p.status()} {' '.join(p.cmdline())}" for p in map(psutil.Process, self.run.processes())]
        lines = self.run.output[-1].read_text(errors="replace").splitlines()[-15:]
        return "\n".join([f"the last fault: {self.fault}", *processes, *lines])

    def _rank(self) -> int | None:
        alive = self.run.ranks()
        return self.rng.choice(alive).pid if alive else None

    def _kill_rank(self) -> bool:
        pid = self._rank()
        return pid is not None and kill(pid)

    def _kill_torchrun(self) -> bool:
        pid = self.run.torchrun()
        return pid is not None and kill(pid)

    def _kill_saving(self) -> bool:
        return wait_for(self.run.is_saving, 20) and self._kill_rank()

    def _kill_writer(self) -> bool:
        rank = self.rng.randrange(self.ranks)
        before = set(self.run.children(rank))
        writers: set[int] = set()

        def appears() -> bool:
            writers.update(set(self.run.children(rank)) - before)
            return bool(writers)

        return wait_for(appears, 20) and kill(writers.pop())

    def _kill_worker(self) -> bool:
        children = self.run.children(self.rng.randrange(self.ranks))
        return bool(children) and not self.run.is_saving() and kill(self.rng.choice(children))

    def _signal_rank(self, number: signal.Signals) -> bool:
        pid = self._rank()
        return pid is not None and kill(pid, number)

    def _signal_launcher(self, number: signal.Signals) -> bool:
        assert self.run.launcher is not None
        return kill(self.run.launcher.pid, number)

    def _stop_rank(self) -> bool:
        pid = self._rank()
        if pid is None or not kill(pid, signal.SIGSTOP):
            return False
        time.sleep(3)
        return kill(pid, signal.SIGCONT)

    def _flip(self) -> bool:
        whole = self.run.run.complete_checkpoints()
        if len(whole) < 2:
            return False
        with contextlib.suppress(OSError):  # retention may delete it meanwhile
            files = sorted(path for path in whole[-1].rglob("*") if path.is_file() and path.stat().st_size)
            flip_bit(self.rng.choice(files), self.rng)
        return self._kill_rank()

    def _fill_disk(self) -> bool:
        assert self.disk is not None
        ballast = self.disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(1 << 20))
        wait_for(lambda: self.run.exit_code() is not None, 60)  # the next save fails
        ballast.unlink()
        return True


@contextlib.contextmanager
def small_disk(folder: Path, mib: int = 400) -> Iterator[Path | None]:
    """A file system in memory of this size, which only root may mount; None where it cannot be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    problem = "only root may mount one"
    if os.geteuid() == 0:
        problem = subprocess.run(mount, stderr=subprocess.PIPE, text=True).stderr.strip()
    if problem:
        print(f"no disk is filled: there is no small one ({problem})", flush=True)
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_drill(folder: Path, options: argparse.Namespace) -> bool:
    """Both runs and the table; True if they end alike."""
    corpus = folder / "corpora" / "prose"
    subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "data", "sample", "--output", str(corpus.parent)], check=True
    )
    words = [f"trainer.max_steps={options.steps}", "trainer.log_every_n_steps=1", "trainer.val_check_interval=100"]
    words += [f"log.ckpt.every_n_train_steps={SAVE_EVERY}", "log.ckpt.keep_last=3", f"--devices={options.ranks}"]
    words += ["data.num_workers=1"]  # so that there is a data worker to kill
    undisturbed = DrilledRun(folder, corpus, "undisturbed", words)
    undisturbed.start()
    assert undisturbed.launcher is not None
    if undisturbed.launcher.wait() != 0:
        raise SystemExit(f"the undisturbed run failed: see {undisturbed.output[-1]}")
    with small_disk(_made(folder / "disk")) if options.full_disk else contextlib.nullcontext() as disk:
        words = [*words, "--retries=1000", "--retry-wait=0"]
        run = DrilledRun(disk or folder, corpus, "disturbed", words)
        drill = Drill(run, random.Random(options.seed), options.ranks, disk)
        run.start()
        end = time.monotonic() + 60 * options.minutes
        while time.monotonic() < end and not run.is_finished and _count(drill) < options.faults:
            drill.do_one()
        drill.continue_until(lambda: False)
        alike = run.weights() == undisturbed.weights() and run.losses() == undisturbed.losses()
        _print_table(drill, alike)
    return alike


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _count(drill: Drill) -> int:
    return sum(len(tally.seconds) for tally in drill.tallies.values())


def _print_table(drill: Drill, alike: bool) -> None:
    print("| fault | times | on again by itself | by `launch.py resume` | seconds, median | longest |")
    print("|---|---|---|---|---|---|")
    for name, tally in sorted(drill.tallies.items()):
        times, seconds = len(tally.seconds), f"{statistics.median(tally.seconds):.1f} | {max(tally.seconds):.1f}"
        print(f"| {name} | {times} | {times - tally.by_command} | {tally.by_command} | {seconds} |")
    steps = len(drill.run.losses())
    print(f"{_count(drill)} faults; {steps} losses and the last weights are {'equal' if alike else 'NOT EQUAL'}")


def main() -> int:
    """Read the options; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="stop to disturb after this time")
    parser.add_argument("--faults", type=int, default=10_000, help="or after so many faults")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--no-full-disk", dest="full_disk", action="store_false", help="do not mount and fill a disk")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="drill-")) if options.keep is None else _made(options.keep)
    try:
        return 0 if run_drill(folder, options) else 1
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
