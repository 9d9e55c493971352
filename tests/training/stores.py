"""What W&B and MLflow hold of a run, by their own readers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def read_wandb(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
    """An offline run's file: the rows of its history, its configuration, and the files of its artifacts."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store: Any = DataStore()
    records: Any = wandb_internal_pb2
    history: list[dict[str, Any]] = []
    config: dict[str, str] = {}
    files: set[str] = set()
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = records.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            )
        config |= {item.key or ".".join(item.nested_key): item.value_json for item in record.run.config.update}
        files |= {entry.path for entry in record.artifact.manifest.contents}
    return history, {name: json.loads(text) for name, text in config.items()}, files


def check_wandb(run: Path, points: list[Any], attempts: int) -> None:
    """One id over all attempts; the newest folder holds every number of the run, and its report."""
    folders = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert len(folders) == attempts and len({folder.name for folder in folders}) == 1
    history, config, files = read_wandb(folders[-1])
    for row, point in zip(history, points, strict=True):
        assert (row["trainer/global_step"], row["_timestamp"]) == (point.step, point.time)
        assert {name: value for name, value in row.items() if "/" in name and name != "trainer/global_step"} == (
            point.numbers
        )
    assert config["trainer.max_steps"] == 20 and files == {"report.html", "config.yaml", "metrics.jsonl"}


def check_mlflow(runs: Path, points: list[Any]) -> None:
    """One run, with every number of the file, its parameters, what the resume changed as a tag, and its report."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(runs / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("qwen25-cpt")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    number_of = 0
    for name in {name for point in points for name in point.numbers}:
        expected = [(p.step, p.numbers[name], int(p.time * 1000)) for p in points if name in p.numbers]
        found = [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, name)]
        assert sorted(found) == sorted(expected), name
        number_of += len(found)
    assert number_of == sum(len(point.numbers) for point in points) > 200 and not math.isnan(
        run.data.metrics["val/loss"]
    )
    assert run.data.params["trainer.max_steps"] == "10" and run.data.tags["attempt-2.trainer.max_steps"] == "20"
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "report.html",
        "config.yaml",
        "metrics.jsonl",
    }
