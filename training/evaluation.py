"""Evaluates checkpoints of a run while it trains, in a process of its own.

A process of its own shares nothing with the training but the cores: no random numbers, no memory of the GPU, no
collective. The losses are the same to the last bit with it and without it, and an evaluation that fails or hangs costs
the run nothing. It reads a copy of the checkpoint made of hard links, which stays complete while the run deletes its
older checkpoints, and takes no room. It runs at the lowest priority, one at a time, and ends with its rank.
"""

# NeMo-Run reads the constructor's types: no `from __future__ import annotations`, `Optional` instead of `X | None`

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from common.commands import python_path
from common.json_files import read_json_object
from common.rundir import RunDir, checkpoint_step
from common.version import ROOT
from training.checkpoints import StepCheckpoint
from training.distributed.rank_env import clear_rank_variables
from training.progress import Progress

log = logging.getLogger("launch")
COPIES = "evaluating"  # folder of the run with the copies, each until its evaluation has ended


class EvaluateCheckpoints(pl.Callback):
    """Starts `launch.py evaluate` for checkpoints when they are complete, and adds the results to metrics.jsonl.

    Args:
        every_n_steps: evaluate the checkpoints whose step is a multiple of this, and the last one; None evaluates none.
        tasks: as `launch.py evaluate --tasks`.
        against: as `--against`; None compares with the base model.
        limit: items of each task at most.
        device: "cpu", or "cuda" where the GPU has memory left beside the training.
        minutes: an evaluation that takes longer is ended. The end of a run waits for the last one this long at most.
        run_dir: the run directory runs/NAME. The launcher sets it.
    """

    def __init__(
        self,
        every_n_steps: Optional[int] = None,
        tasks: str = "cloze,next_line,bits",
        against: Optional[str] = None,
        limit: Optional[int] = None,
        device: str = "cpu",
        minutes: float = 30.0,
        run_dir: Optional[str] = None,
    ) -> None:
        self.every_n_steps, self.tasks, self.against = every_n_steps, tasks, against
        self.limit, self.device, self.minutes = limit, device, minutes
        self.run = RunDir.at(run_dir) if run_dir else None
        self._max_steps = 0
        self._process: Any = None
        self._copy: Optional[Path] = None  # what the process reads
        self._waiting: Optional[Path] = None
        self._started = 0.0
        self._progress: Optional[Progress] = None
        self._loggers: list[Any] = []  # while the run trains

    def attach(self, checkpoint: Any) -> None:
        """Have the run's StepCheckpoint call `on_complete`. recipes/limits.py checks that it saves at these steps."""
        if not self.every_n_steps or not isinstance(checkpoint, StepCheckpoint):
            return
        stop()  # of an attempt before this one in the same process
        self.stop()
        checkpoint.on_complete = self.on_complete
        global _current
        _current = self

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._max_steps = trainer.max_steps
        self._progress = next((one for one in trainer.callbacks if isinstance(one, Progress)), None)
        self._loggers = list(trainer.loggers)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._loggers = []  # they are closed now

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._process is not None:
            self.poll()

    def on_complete(self, saved: Path) -> None:
        """Evaluate this checkpoint now, or after the one that is being evaluated. Called on rank 0."""
        step = checkpoint_step(saved)
        if self.run is None or not self.every_n_steps or (step % self.every_n_steps and step != self._max_steps):
            return
        if self._waiting is not None:
            log.warning("evaluation: %s is left out, the one before it still runs", self._waiting.name)
            shutil.rmtree(self._waiting, ignore_errors=True)
        self._waiting = copy_by_links(saved, self.run.path / COPIES / saved.name)
        self.poll()

    def poll(self) -> None:
        """Take the result of an evaluation that has ended, end one that takes too long, and start the next."""
        if self._process is not None:
            if self._process.poll() is None:
                if time.monotonic() - self._started < 60 * self.minutes:
                    return
                log.warning("evaluation: ended after evaluate.minutes=%g", self.minutes)
                self._process.kill()
                self._process.wait()
            self._take_result()
        if self._waiting is not None:
            self._start(self._waiting)

    def _start(self, copy: Path) -> None:
        assert self.run is not None
        self._copy, self._waiting, self._started = copy, None, time.monotonic()
        log_file = self.run.evaluation(checkpoint_step(copy)).with_suffix(".log")
        log_file.parent.mkdir(exist_ok=True)
        options = {"--tasks": self.tasks, "--against": self.against, "--limit": self.limit, "--device": self.device}
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        command = [sys.executable, "-m", "common.run_beside", str(os.getpid()), str(ROOT / "launch.py"), "evaluate"]
        environ = dict(os.environ)
        clear_rank_variables(environ)
        environ["PYTHONPATH"] = python_path(environ)
        if self.device == "cpu":
            environ["CUDA_VISIBLE_DEVICES"] = ""
        with log_file.open("w") as output:
            self._process = subprocess.Popen(
                [*command, str(copy), *words, "--runs", str(self.run.path.parent)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        log.info("evaluation: %s, in a process of its own (%s)", copy.name, log_file)

    def _take_result(self) -> None:
        """Add the result to metrics.jsonl; a failed evaluation is a warning."""
        assert self.run is not None and self._copy is not None
        code, step = self._process.returncode, checkpoint_step(self._copy)
        shutil.rmtree(self._copy, ignore_errors=True)
        self._process = self._copy = None
        path = self.run.evaluation(step)
        found = read_json_object(path) if code == 0 else None
        if found is None:
            log.warning("evaluation: step %d failed with exit code %s: %s", step, code, path.with_suffix(".log"))
            return
        rows = {f"{row['task']}/{row['metric']}": row for row in found["rows"]}
        for name, row in rows.items():
            if row["verdict"] in ("better", "worse"):
                log.info("evaluation: step %d | %s %+.4f, %s", step, name, row["difference"], row["verdict"])
        values = {name: row["value"] for name, row in rows.items()}
        for logger in self._loggers:
            logger.log_metrics({f"evaluation_{name}": value for name, value in values.items()}, step=step)
        if self._progress is not None:
            self._progress.append_metrics({"step": step, "time": time.time(), "evaluation": values})

    def finish(self) -> None:
        """Wait for the evaluations that are left, each for `minutes` at most."""
        if self._process is not None:
            log.info("evaluation: waiting for the last one; Ctrl-C leaves it out")
        while self._process is not None:
            self.poll()
            time.sleep(0.2)

    def stop(self) -> None:
        """End what runs, and remove the copies."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self.run is not None:
            shutil.rmtree(self.run.path / COPIES, ignore_errors=True)


_current: Optional[EvaluateCheckpoints] = None  # of this process


def finish() -> None:
    """Wait for the evaluations of this process's run. The ranks have left their collectives by then."""
    if _current is None:
        return
    try:
        _current.finish()
    except KeyboardInterrupt:
        log.warning("evaluation: left out")
    finally:
        stop()


def stop() -> None:
    """End the evaluations of this process's run, and remove the copies of the checkpoints."""
    if _current is not None:
        _current.stop()


def copy_by_links(source: Path, target: Path) -> Path:
    """Copy a folder as hard links to its files; where the file system has none, as files.

    Returns:
        `target`, which replaces what an ended process may have left there.
    """
    shutil.rmtree(target, ignore_errors=True)

    def link(file: str, copy: str) -> None:
        try:
            os.link(file, copy)
        except OSError:
            shutil.copy2(file, copy)

    shutil.copytree(source, target, copy_function=link)
    return target
