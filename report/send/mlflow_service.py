"""MLflow: a tracking server (MLFLOW_TRACKING_URI), or a folder of files beside the runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from common import run_status
from common.rundir import RunDir
from report.send.rows import MOST_NUMBERS, Point
from report.send.service import PROJECT, Sent, check_reachable

FOLDER = "mlruns"  # in the folder of the runs
_MOST_PARAMS, _MOST_CHARACTERS = 100, 6000  # per request, by MLflow's API; 1000 metrics
_STATUS = {run_status.DONE: "FINISHED", run_status.INTERRUPTED: "KILLED"}
# a server that stops answering costs 20 s per call, not MLflow's own 8 tries of up to 120 s; the sender tries again
_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


class MlflowService:
    """One run at an MLflow tracking server or in a local store."""

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def open(self, run: RunDir, sent: Sent, configuration: dict[str, Any]) -> str:
        for key, value in {**_LIMITS, "MLFLOW_ALLOW_FILE_STORE": "true"}.items():
            os.environ.setdefault(key, value)
        from mlflow.tracking import MlflowClient

        store = run.path.parent / FOLDER
        uri = os.environ.get("MLFLOW_TRACKING_URI") or store.absolute().as_uri()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        check_reachable(uri)
        self._client = MlflowClient(tracking_uri=uri)
        if f"{uri} {experiment}" != sent.where:
            sent.id, sent.where, sent.bytes = "", f"{uri} {experiment}", 0
        self._id = sent.id
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            self._id = sent.id = self._client.create_run(number, run_name=run.name).info.run_id
        self._send_configuration({name: str(value)[:_MOST_CHARACTERS] for name, value in configuration.items()})
        if "MLFLOW_TRACKING_URI" in os.environ:
            return f"run {self._id} of experiment {experiment} at {uri}"
        return f"local; `mlflow ui --backend-store-uri {os.path.relpath(store)}` shows it"

    def _send_configuration(self, configuration: dict[str, str]) -> None:
        """Parameters cannot change at MLflow: what a resume has changed becomes a tag."""
        from mlflow.entities import Param, RunTag

        there = self._client.get_run(self._id).data.params
        params = [Param(name, value) for name, value in configuration.items() if name not in there]
        changed = {name: value for name, value in configuration.items() if there.get(name, value) != value}
        attempt = configuration.get("run.attempt", "1")
        tags = [RunTag(f"attempt-{attempt}.{name}", value) for name, value in changed.items()]
        for start in range(0, max(len(params), len(tags)), _MOST_PARAMS):
            end = start + _MOST_PARAMS
            self._client.log_batch(self._id, params=params[start:end], tags=tags[start:end])

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = (
            Metric(name, float(value), int(point.time * 1000), point.step)
            for point in points
            for name, value in point.numbers.items()
        )
        while batch := list(islice(metrics, MOST_NUMBERS)):
            self._client.log_batch(self._id, metrics=batch)

    def finish(self, phase: str, files: Sequence[Path]) -> str:
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, status=_STATUS.get(phase, "FAILED"))
        return ""
