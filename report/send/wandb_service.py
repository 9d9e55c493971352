"""Weights & Biases, online, or offline where there is no key: never a login prompt."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import run_status
from common.rundir import RunDir
from report.send.rows import Point
from report.send.service import CONTACT_S, PROJECT, Sent, check_reachable

STEP = "trainer/global_step"  # the name that Lightning's logger uses, so that charts of other projects fit
_EXIT_CODES = {run_status.DONE: 0, run_status.INTERRUPTED: 130}


def has_key() -> bool:
    """Whether W&B can log in without a question: by WANDB_API_KEY, an identity token, or `wandb login` (netrc)."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc

    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    places = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in filter(Path.is_file, places):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            return netrc.netrc(str(path)).authenticators(host) is not None
    return False


class WandbService:
    """One run at W&B. Its files are in runs/NAME/wandb."""

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: RunDir, sent: Sent, configuration: dict[str, Any]) -> str:
        asked = os.environ.get("WANDB_MODE", "")
        mode = asked or ("online" if has_key() else "offline")
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        base = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        where = f"{base}/{os.environ.get('WANDB_ENTITY', '')}/{project} {mode}"
        if where != sent.where or mode == "offline":
            sent.bytes = 0  # an offline folder is complete by itself: the newest one replaces those before it
        sent.id, sent.where = sent.id or uuid.uuid4().hex[:12], where
        if mode == "online":
            check_reachable(base)
        self._start(run, sent, configuration, project, mode)
        if mode == "offline":
            why = "WANDB_MODE=offline" if asked else "offline, because there is no key (`wandb login` or WANDB_API_KEY)"
            return f"{why}; `wandb sync {self._folder()}` uploads it"
        line = f"{mode}, {self._run.url or self._folder()}"
        if sent.bytes and not sent.finished and mode == "online":
            line += f"; before, not all had arrived: `wandb sync {os.path.relpath(run.path)}/wandb/run-*` sends it"
        return line

    def _start(self, run: RunDir, sent: Sent, configuration: dict[str, Any], project: str, mode: str) -> None:
        os.environ.setdefault("WANDB_DATA_DIR", str((run.path / "wandb").absolute()))  # else copies of files in $HOME
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=CONTACT_S,
            login_timeout=CONTACT_S,
            x_disable_stats=True,  # of this process, which is not the one that trains; system.jsonl has the GPUs
            disable_code=True,
            disable_git=True,
        )
        self._run = wandb.init(
            project=project,
            entity=os.environ.get("WANDB_ENTITY"),
            id=sent.id,
            name=run.name,
            dir=str(run.path),
            config=configuration,
            resume=None if mode == "offline" else "allow",
            mode=mode,  # type: ignore[arg-type] # a word of the user's, which W&B checks
            settings=settings,
        )
        if sent.bytes == 0:
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)

    def _folder(self) -> str:
        return os.path.relpath(Path(self._run.settings.sync_dir)) if self._run.settings.sync_dir else ""

    def log(self, points: Sequence[Point]) -> None:
        for point in points:  # without W&B's own step, which must not go back: a resumed run repeats steps
            self._run.log({STEP: point.step, "_timestamp": point.time, **point.numbers})

    def finish(self, phase: str, files: Sequence[Path]) -> str:
        import wandb

        if files:
            artifact = wandb.Artifact(f"run-{self._run.id}-report", type="report")
            for file in files:
                artifact.add_file(str(file), skip_cache=True)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=_EXIT_CODES.get(phase, 1))
        return ""
