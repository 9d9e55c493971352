"""runs/NAME: the one place that knows where a run keeps what.

by the launcher: spec.json run.yaml config.yaml env.json command.txt version.txt
by `launch.py fork` and `soup`: origin.json
before the first step, where the corpora are: data.json blend.json base.json
during the run: gates.json step0.json first-validation.npz metrics.jsonl status.json system.jsonl logs/attempt-N/ tb/
    checkpoints/step-N/ logger-SERVICE.json (where log.loggers names one)
with every checkpoint: ledger.json
command.txt is that of the newest attempt; those of the others are in their logs/attempt-N/
by `launch.py forecast`, during the run or after it: forecast.json
after it: export.json report.html
by `launch.py evaluate`, during the run or after it: evaluation/step-N.json
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common import run_lock
from common.commands import launch_command
from common.environment.merge import Setting
from common.errors import UserError, unknown_name
from common.files import write_atomic
from common.origin import FILE_NAME as ORIGIN
from common.origin import read_origin
from common.spec import RunSpec
from common.version import code_version

RUNS = Path("runs")
UNFINISHED = "-unfinished"  # NeMo's marker file beside a checkpoint that is being written


class RunDir:
    """Paths of one run, and what the launcher writes there."""

    def __init__(self, name: str, root: Path = RUNS) -> None:
        self.name, self.path = name, root / name
        self.spec_file = self.path / "spec.json"
        self.config = self.path / "config.yaml"
        self.env = self.path / "env.json"
        self.command = self.path / "command.txt"
        self.version = self.path / "version.txt"
        self.run_file = self.path / "run.yaml"
        self.data = self.path / "data.json"
        self.base = self.path / "base.json"
        self.gates = self.path / "gates.json"
        self.step0 = self.path / "step0.json"
        self.export = self.path / "export.json"
        self.blend = self.path / "blend.json"
        self.ledger = self.path / "ledger.json"
        self.metrics = self.path / "metrics.jsonl"
        self.origin = self.path / ORIGIN
        self.first_validation = self.path / "first-validation.npz"
        self.status = self.path / "status.json"
        self.forecast = self.path / "forecast.json"
        self.logs = self.path / "logs"
        self.tensorboard = self.path / "tb"
        self.checkpoints = self.path / "checkpoints"

    @property
    def as_argument(self) -> str:
        """The run as commands take it: NAME, or its path where it is not in runs/."""
        return self.name if self.path.parent == RUNS else str(self.path)

    @classmethod
    def at(cls, path: str | Path) -> RunDir:
        """The run directory at `path`, which need not exist yet."""
        return cls(Path(path).name, Path(path).parent)

    def logger_record(self, service: str) -> Path:
        """What has been sent to a service (report/send), and the id of the run there."""
        return self.path / f"logger-{service}.json"

    @property
    def attempts(self) -> list[Path]:
        return _numbered_folders(self.logs, "attempt")

    def system_samples(self, node: int = 0) -> Path:
        """The samples of one node: system.jsonl of the first node, system-1.jsonl of the next, and so on."""
        return self.path / ("system.jsonl" if node == 0 else f"system-{node}.jsonl")

    def evaluation(self, step: int) -> Path:
        """The evaluation of the checkpoint of this step."""
        return self.path / "evaluation" / f"step-{step}.json"

    def evaluations(self) -> list[Path]:
        """All evaluations, by step."""
        found = [path for path in self.evaluation(0).parent.glob("step-*.json") if path.stem[5:].isdigit()]
        return sorted(found, key=lambda path: int(path.stem[5:]))

    def attempt(self, number: int) -> Path:
        """The log folder of the attempt with this number, from 1."""
        return self.logs / f"attempt-{number}"

    def spec(self) -> RunSpec:
        """What the launcher was asked for.

        Raises:
            UserError: the run was never written.
        """
        if not self.spec_file.is_file():
            raise UserError(
                f"no run is written in {self.path}",
                expected=str(self.spec_file),
                found="no such file",
                do="python launch.py --recipe NAME --executor mpirun --dryrun --write, and start what it prints",
            )
        return RunSpec.from_json(self.spec_file.read_text())

    @property
    def used(self) -> bool:
        """Something was trained here or is about to be (a dry run leaves nothing of that).

        A job that waits in a queue leaves nothing yet either: the executor asks the queue.
        """
        claimed = run_lock.is_held_elsewhere(self.path, run_lock.LAUNCHER)
        return bool(self.attempts) or self.checkpoints.exists() or claimed

    def complete_checkpoints(self) -> list[Path]:
        """Checkpoints that were written to the end, oldest first."""
        return [
            folder
            for folder in _numbered_folders(self.checkpoints, "step")
            # in this order: `set_aside_unfinished` on another rank renames the folder before its marker goes
            if not _marker(folder).exists() and (folder / "weights" / "metadata.json").is_file()
        ]

    def newest_step(self) -> int:
        """The step of the newest complete checkpoint, which the next attempt continues from; 0 without one."""
        complete = self.complete_checkpoints()
        return checkpoint_step(complete[-1]) if complete else 0

    def set_aside_unfinished(self) -> list[Path]:
        """Rename checkpoints whose writing was cut off, so that they stand in nobody's way; keep the newest of them.

        Returns:
            the new folders that are kept, checkpoints/unfinished-step-N-after-attempt-K.
        """
        complete, moved = set(self.complete_checkpoints()), []
        for folder in _numbered_folders(self.checkpoints, "step"):
            if folder in complete:
                continue
            target = folder.with_name(f"unfinished-{folder.name}-after-attempt-{len(self.attempts)}")
            folder.rename(target)
            _marker(folder).unlink(missing_ok=True)
            moved.append(target)
        for marker in self.checkpoints.glob(f"step-*{UNFINISHED}"):
            if re.fullmatch(rf"step-\d+{UNFINISHED}", marker.name):
                marker.unlink()
        for older in sorted(self.checkpoints.glob("unfinished-step-*-after-attempt-*"), key=_attempt_and_step)[:-1]:
            shutil.rmtree(older, ignore_errors=True)
        return [folder for folder in moved if folder.is_dir()]

    def set_aside_damaged(self, checkpoint: Path, problems: Sequence[str]) -> Path:
        """Rename a damaged checkpoint, so that nothing continues from it and nothing is lost; returns the folder."""
        target = checkpoint.with_name(f"damaged-{checkpoint.name}-before-attempt-{len(self.attempts)}")
        (checkpoint / "damage.txt").write_text("\n".join(problems) + "\n")
        checkpoint.rename(target)
        return target

    @property
    def written(self) -> list[Path]:
        """The files that the launcher makes: all that the ranks need, so all that is sent to where they run."""
        return [self.spec_file, self.config, self.env, self.command, self.version, self.run_file]

    def write(self, spec: RunSpec, config: str, settings: Sequence[Setting], argv: Sequence[str]) -> None:
        """Everything needed to know, and repeat, what was run; the command of the attempt before goes to its logs."""
        before = self.attempt(spec.attempt - 1)
        if before.is_dir() and self.command.is_file():
            write_atomic(before / self.command.name, self.command.read_text())
        write_atomic(self.spec_file, spec.to_json())
        write_atomic(self.config, config)
        write_atomic(self.env, json.dumps([asdict(s) for s in settings], indent=1) + "\n")
        write_atomic(self.command, shlex.join(argv) + "\n")
        write_atomic(self.version, code_version() + "\n")


def checkpoint_step(checkpoint: Path) -> int:
    """The step of a checkpoint folder step-N."""
    return int(checkpoint.name.split("-")[1])


def _numbered_folders(folder: Path, word: str) -> list[Path]:
    """The folders WORD-N in `folder`, by their number; anything else there, such as `step-40 copy`, is left alone."""
    found = [path for path in folder.glob(f"{word}-*") if re.fullmatch(rf"{word}-[0-9]+", path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def _attempt_and_step(unfinished: Path) -> tuple[int, ...]:
    """Attempt and step of unfinished-step-N-after-attempt-K, with the newest highest; other names come first."""
    match = re.fullmatch(r"unfinished-step-([0-9]+)-after-attempt-([0-9]+)", unfinished.name)
    return (int(match[2]), int(match[1])) if match else ()


def _marker(checkpoint: Path) -> Path:
    return checkpoint.with_name(checkpoint.name + UNFINISHED)


def existing_run(run: str | Path, root: Path = RUNS) -> RunDir | None:
    """The run meant by NAME (a folder under `root`) or by a path such as runs/NAME; None if it does not exist."""
    path = Path(run).expanduser()
    folder = path if len(path.parts) > 1 else root / path
    return RunDir(folder.name, folder.parent) if folder.name and folder.is_dir() else None


def find_run(run: str | Path, root: Path = RUNS) -> RunDir:
    """The run that a user names: NAME or runs/NAME (every command that takes a run accepts both).

    Raises:
        UserError: there is no such run; the nearest name is offered.
    """
    if found := existing_run(run, root):
        return found
    path = Path(run)
    folder = path.parent if len(path.parts) > 1 else root
    names = sorted(p.name for p in folder.glob("*") if p.is_dir())
    if not names:
        raise UserError(
            f"no run {path.name!r}",
            expected=f"a folder in {folder}",
            found=f"no runs at all in {folder}",
            do=f"train first: {launch_command('--recipe', 'qwen25_tiny')}",
        )
    lists = launch_command("list", *(() if folder == RUNS else ("--runs", str(folder))))
    raise unknown_name("run", path.name, names, f"{lists} shows them")


def find_checkpoint(source: str | Path, root: Path = RUNS) -> Path:
    """The checkpoint that a user names: a checkpoint folder, or the newest complete one of a run.

    Args:
        source: runs/NAME/checkpoints/step-N, an imported checkpoint, or a run as `find_run` takes it.

    Raises:
        UserError: there is no such run, or it has no complete checkpoint.
    """
    if (Path(source) / "weights").is_dir():
        return Path(source)
    run = find_run(source, root)
    if complete := run.complete_checkpoints():
        return complete[-1]
    raise UserError(
        f"no complete checkpoint in {run.path}",
        expected=f"a checkpoint that was written to the end in {run.checkpoints}",
        found="no checkpoints" if not run.checkpoints.is_dir() else "only interrupted ones, or none",
        do="train longer, or give a checkpoint folder",
    )


def choose(spec: RunSpec, root: Path = RUNS) -> RunDir:
    """The run directory that `spec` means.

    Raises:
        UserError: a name that is a path, an explicit name in use, or --resume of a run that does not exist.
    """
    name = spec.name or spec.recipe.rpartition(":")[2]  # FILE.py:function takes the function's name
    if Path(name).parent == root:  # runs/NAME means NAME
        name = Path(name).name
    if not spec.resume:
        check_run_name(name)
    taken = [root / name] if spec.name else _numbered(name, root)
    run = RunDir(taken[-1].name if spec.resume and taken else name, root)
    if spec.resume:
        if spec.name:
            find_run(name, root)
        if not run.path.exists():
            check_resumable(run)
        return run
    if spec.name:
        run_lock.check_free(run.path)
    if run.used and spec.name:
        raise UserError(
            f"{run.path} holds a run already",
            expected="a name that is not in use",
            found=f"{len(run.attempts)} attempt(s), {len(run.complete_checkpoints())} checkpoint(s)",
            do="--name ANOTHER for a new run, or "
            + (
                f"`{launch_command('resume', name)}` to continue it"
                if run.complete_checkpoints()
                else f"delete {run.path}: it has no checkpoint"
            ),
        )
    count = 1
    while run.used:
        count += 1
        run = RunDir(f"{name}-{count}", root)
    return run


def check_run_name(name: str, do: str = "--name my-run") -> None:
    """Check that a run of this name can be started by every executor: it names a folder, a job and a container.

    Raises:
        UserError: it holds anything but letters, digits and . _ - (Slurm expands %, Kubernetes takes no spaces).
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,59}", name):
        raise UserError(
            f"{name!r} cannot name a run",
            expected="1 to 60 of A-Z a-z 0-9 . _ -, a letter or digit first",
            found=repr(name),
            do=do,
        )


def _numbered(name: str, root: Path) -> list[Path]:
    found = [p for p in root.glob("*") if re.fullmatch(rf"{re.escape(name)}(-[0-9]+)?", p.name)]
    return sorted(
        (p for p in found if RunDir(p.name, root).used),
        key=lambda p: max((a.stat().st_mtime for a in RunDir(p.name, root).attempts), default=0.0),
    )


def _another_run(run: RunDir) -> str:
    if not run.run_file.is_file():
        return f"`{launch_command('list')}` shows the runs and their checkpoints"
    return f"`{launch_command('--config', str(run.run_file), '--name', f'{run.name}-again')}` repeats it as a new run"


def check_resumable(run: RunDir) -> None:
    """Check that the run has a complete checkpoint to train on from; to be called where its checkpoints are.

    Raises:
        UserError: it has none, or only one that was merged of others.
    """
    origin = read_origin(run.origin)
    if origin is not None and origin.kind == "merge":
        export = launch_command("convert", "export", str(run.path), f"models/{run.name}")
        raise UserError(
            f"{run.path} was merged of several checkpoints, and training cannot continue from it",
            expected="a checkpoint with the state of the optimizer",
            found=f"{origin.describe()}; a merge has weights only",
            do=f"{launch_command('fork', origin.run, str(origin.steps[-1]), 'NAME')} for a checkpoint of its run; or"
            f" {export}, and a new run with resume.base=models/{run.name}",
        )
    if not run.complete_checkpoints():
        raise UserError(
            f"nothing to resume in {run.path}",
            expected=f"a complete checkpoint under {run.checkpoints}",
            found="the run does not exist" if not run.path.exists() else "no checkpoint that was written to the end",
            do=_another_run(run),
        )
