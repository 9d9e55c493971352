"""Evaluates checkpoints of a run while it trains, in a process of its own.

A process of its own shares nothing with the training but the cores: no random numbers, no memory of the GPU, no
collective. The losses are the same to the last bit with it and without it, and an evaluation that fails or hangs costs
the run nothing. It reads a copy of the checkpoint made of hard links, which stays complete while the run deletes its
older checkpoints, and takes no room. It runs at the lowest priority, one at a time, and ends with its rank. Rank 0
alone starts evaluations; at the end of a run the other ranks stay until it has the last result.
"""

# NeMo-Run reads the constructor's types: no `from __future__ import annotations`, `Optional` instead of `X | None`

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl

from common import rank_states
from common.checkpoint_files import copy_by_links
from common.commands import python_path
from common.json_files import read_json_object
from common.rundir import RunDir, checkpoint_step
from common.version import ROOT
from training import sigterm
from training.checkpoints import StepCheckpoint
from training.distributed.rank_env import clear_rank_variables
from training.progress import Progress

log = logging.getLogger("launch")
COPIES = "evaluating"  # folder of the run with the copies, each until its evaluation has ended
_MOST_THREADS = 16
_MARGIN_S = 300.0  # what starting and ending two evaluations may take beyond `minutes` each


class EvaluateCheckpoints(pl.Callback):
    """Starts `launch.py evaluate` for checkpoints when they are complete, and adds the results to metrics.jsonl.

    Args:
        every_n_steps: evaluate the checkpoints whose step is a multiple of this, and the last one; None evaluates none.
        tasks: as `launch.py evaluate --tasks`; None takes its default.
        against: as `--against`; None compares with the base model.
        limit: items of each task at most.
        device: "cpu", or "cuda" where the GPU has memory left beside the training.
        minutes: an evaluation that takes longer is ended. The end of a run waits for the last one this long at most.
        run_dir: the run directory runs/NAME. The launcher sets it.
    """

    def __init__(
        self,
        every_n_steps: Optional[int] = None,
        tasks: Optional[str] = None,
        against: Optional[str] = None,
        limit: Optional[int] = None,
        device: str = "cpu",
        minutes: float = 30.0,
        run_dir: Optional[str] = None,
    ) -> None:
        self.every_n_steps, self.tasks, self.against = every_n_steps, tasks, against
        self.limit, self.device, self.minutes = limit, device, minutes
        self.run = RunDir.at(run_dir) if run_dir else None
        self._process: Any = None
        self._copy: Optional[Path] = None  # what the process reads
        self._waiting: Optional[Path] = None
        self._started = 0.0
        self._newest = -1  # the step of the newest checkpoint that was taken
        self._progress: Optional[Progress] = None
        self._loggers: list[Any] = []
        self._trains = False

    def attach(self, checkpoint: Any) -> None:
        """Have the run's StepCheckpoint call `on_complete`. recipes/limits.py checks that it saves at these steps.

        To be called on rank 0 only: the copies are in a folder that all ranks share.
        """
        if not self.every_n_steps or not isinstance(checkpoint, StepCheckpoint):
            return
        stop()  # of an attempt before this one in the same process
        if self.run is not None:
            shutil.rmtree(self.run.path / COPIES, ignore_errors=True)  # of an attempt that was killed
        checkpoint.on_complete = self.on_complete
        global _current
        _current = self

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress = next((one for one in trainer.callbacks if isinstance(one, Progress)), None)
        self._loggers, self._trains = list(trainer.loggers), True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._trains = False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._process is not None:
            self.poll()

    def on_complete(self, saved: Path) -> None:
        """Evaluate this checkpoint now, or after the one that is being evaluated. Called on rank 0."""
        if self.every_n_steps and checkpoint_step(saved) % self.every_n_steps == 0:
            self._take(saved)

    def _take(self, saved: Path) -> None:
        if self.run is None:
            return
        if self._waiting is not None:
            log.warning("evaluation: %s is left out, the one before it still runs", self._waiting.name)
            shutil.rmtree(self._waiting, ignore_errors=True)
        self._newest = checkpoint_step(saved)
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
            environ["OMP_NUM_THREADS"] = str(min(_MOST_THREADS, len(os.sched_getaffinity(0))))  # a rank has fewer
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
            if not self._trains:  # it was closed, and has opened a file of its own for this
                logger.finalize("success")
        if self._progress is not None:
            self._progress.append_metrics({"step": step, "time": time.time(), "evaluation": values})

    def finish(self) -> None:
        """Evaluate the last checkpoint, and wait for the evaluations that are left, each for `minutes` at most."""
        whole = self.run.complete_checkpoints() if self.run is not None else []
        if whole and checkpoint_step(whole[-1]) > self._newest:
            self._take(whole[-1])
        if self._process is not None:
            log.info("evaluation: waiting for the last one; Ctrl-C leaves it out")
        while self._process is not None:
            if sigterm.is_pending():
                log.warning("evaluation: left out, SIGTERM from the scheduler")
                return
            self.poll()
            time.sleep(0.2)

    def stop(self) -> None:
        """End what runs, and remove its copies."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for copy in (self._copy, self._waiting):
            if copy is not None:
                shutil.rmtree(copy, ignore_errors=True)
        self._process = self._copy = self._waiting = None
        if self.run is not None:
            with contextlib.suppress(OSError):
                (self.run.path / COPIES).rmdir()


_current: Optional[EvaluateCheckpoints] = None  # of this process


def finish() -> None:
    """Wait for the evaluations of this process's run, on rank 0. The ranks are in no collective then."""
    if _current is None:
        return
    try:
        _current.finish()
    except KeyboardInterrupt:
        log.warning("evaluation: left out")
    finally:
        stop()


def wait_for_rank_0(logs: Path, minutes: float) -> None:
    """Stay until rank 0, which waits for its evaluations, has recorded its end in `logs`; on the other ranks.

    srun ends rank 0 a minute after the others have left. A collective would have a timeout of its own, so they look at
    a file: for two evaluations of `minutes` at most, the one that runs at the end and that of the last checkpoint.
    """
    end = time.monotonic() + 2 * 60 * minutes + _MARGIN_S
    with contextlib.suppress(KeyboardInterrupt):  # rank 0 has it too, and leaves the evaluation out
        while time.monotonic() < end and not sigterm.is_pending():
            if any(state.rank == 0 and state.state != rank_states.RUNNING for state in rank_states.read(logs)):
                return
            time.sleep(0.5)


def stop() -> None:
    """End the evaluations of this process's run, and remove the copies of the checkpoints."""
    global _current
    if _current is not None:
        _current.stop()
    _current = None
