"""What a service must offer to the sender, and what the sender remembers of it in runs/NAME/logger-SERVICE.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.files import write_atomic
from common.json_files import read_json_object
from common.rundir import RunDir
from report.send.rows import Point

PROJECT = "qwen25-cpt"  # the project at W&B and the experiment at MLflow, unless WANDB_PROJECT or MLFLOW_... name one
CONTACT_S = 10.0  # that a server may take to answer


@dataclass
class Sent:
    """What a service has of a run.

    Args:
        id: the service's own id of the run, which a resumed run continues; "" before the first contact.
        where: the server, project or folder that knows the id. Another one starts from the first line.
        bytes: how much of metrics.jsonl it was given.
        finished: it has said that all of it has arrived.
    """

    id: str = ""
    where: str = ""
    bytes: int = 0
    finished: bool = False

    @classmethod
    def load(cls, run: RunDir, name: str) -> Sent:
        row = read_json_object(run.logger_record(name)) or {}
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in row.items() if key in known})

    def save(self, run: RunDir, name: str) -> None:
        write_atomic(run.logger_record(name), json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def check_reachable(url: str) -> None:
    """Ask a server for anything, so that one that is away is known in seconds: W&B's library tries for minutes.

    Raises:
        requests.RequestException: no answer within `CONTACT_S`, directly or through the proxy of the environment.
    """
    if url.startswith(("http://", "https://")):
        import requests

        requests.get(url, timeout=CONTACT_S, stream=True).close()


class Service(Protocol):
    """A service in one process. Each method may raise whatever the service's library raises."""

    def open(self, run: RunDir, sent: Sent, configuration: dict[str, Any]) -> str:
        """Create the run there, or continue the one of `sent`, which is updated; returns a line that says where."""

    def log(self, points: Sequence[Point]) -> None:
        """Send these numbers."""

    def finish(self, phase: str, files: Sequence[Path]) -> str:
        """Send the files and end the run; `phase` is one of common/run_status.py. Returns a line, or ""."""
