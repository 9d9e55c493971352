"""Scores a model with EleutherAI's lm-evaluation-harness, through its own API and without any network.

torch, transformers and the harness are imported inside the functions: the other modules of report/ start in a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from common.errors import UserError
from report.evaluation.benchmark_folders import describe_folders
from report.evaluation.comparison import Score

BENCHMARKS = Path("corpora/benchmarks")  # where the data of the harness's own tasks are looked for, as OWNER/NAME
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_EVALUATE_OFFLINE")
LONGEST = 4096  # tokens of context at most: no task here has more, and the logits of 32,768 do not fit in memory
KNOWN = "hellaswag, arc_easy, arc_challenge, piqa, winogrande, lambada_openai, mmlu, ceval-valid, cmmlu"


_SEED = 1234  # the harness's own default for the choice of few-shot examples


@dataclass(frozen=True)
class ScoreOptions:
    """How a model is scored; the same for both models of a comparison.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: "float32" or "bfloat16".
        max_length: tokens of context at most.
        batch_size: items at a time.
        limit: items of each task at most; None takes all.
    """

    device: str
    dtype: str
    max_length: int
    batch_size: int
    limit: int | None


@dataclass(frozen=True)
class TaskScores:
    """What one task gave.

    Args:
        name: of the task or group as it was asked for.
        items: identity of each item (the harness's hashes of document, prompt and target).
        metrics: metric -> score of each item.
        higher_is_better: metric -> whether it is.
    """

    name: str
    items: list[str]
    metrics: dict[str, list[Score]]
    higher_is_better: dict[str, bool]


def is_installed() -> bool:
    """Whether the harness can be imported."""
    return util.find_spec("lm_eval") is not None


def check_installed() -> str:
    """The harness's version.

    Raises:
        UserError: it is not installed.
    """
    if not is_installed():
        raise UserError(
            "the lm-evaluation-harness is not installed",
            expected="the package lm_eval",
            found=f"none in {sys.prefix}",
            do="pip install 'lm_eval==0.4.13' -c constraints.txt",
        )
    return metadata.version("lm_eval")


def go_offline() -> None:
    """Let no library use the network, in this process. To be called before any of them is imported.

    Threads that wait asleep: beside a run that trains on the same cores, waiting awake takes 50 times as long.
    """
    os.environ.update(dict.fromkeys(OFFLINE, "1"))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def load_tasks(names: Sequence[str], folder: Path | None, benchmarks: Path = BENCHMARKS) -> Any:
    """The harness's tasks, with their data.

    Args:
        names: tasks and groups.
        folder: of tasks that this project has made.
        benchmarks: folder with the data sets of the harness's own tasks, each in its OWNER/NAME.

    Returns:
        what the harness's TaskManager.load gives.

    Raises:
        UserError: an unknown name, or a task whose data are not on this machine.
    """
    from datasets import disable_progress_bars
    from lm_eval.tasks import TaskManager

    disable_progress_bars()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    places = _find_definitions() if any(not _is_local(name, folder) for name in names) else {}
    if unknown := [name for name in names if not _is_local(name, folder) and name not in places]:
        raise _unknown_task(unknown[0], list(places))
    folders = [*([folder] if folder else []), *{places[name] for name in names if name in places}]
    manager = TaskManager(include_path=[str(one.absolute()) for one in folders], include_defaults=False)
    describe_folders(benchmarks)
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    with _working_folder(benchmarks):  # where `datasets` looks for OWNER/NAME before it asks the hub
        for name in names:
            try:
                found = manager.load([name])
            except Exception as error:  # every loader and every version of `datasets` raises its own
                raise _missing_data(name, manager.task_index[name].yaml_path, benchmarks, error) from None
            for kind, members in loaded.items():
                members.update(found[kind])
    return loaded


def open_model(model: Path, options: ScoreOptions) -> Any:
    """The harness's wrapper of an exported model.

    Args:
        model: a Hugging Face folder.

    Raises:
        UserError: the model cannot be loaded.
    """
    import torch
    from lm_eval.models.huggingface import HFLM

    from data.tokenizer import eod_id, load_tokenizer
    from training.safe_load import load_hf_model

    tokenizer = load_tokenizer(str(model))
    network = load_hf_model(model, getattr(torch, options.dtype)).to(options.device)
    return HFLM(
        pretrained=network,
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        max_length=options.max_length,
        prefix_token_id=eod_id(tokenizer),  # what stood before each document in training
    )


def score(model: Any, tasks: Any, name: str, options: ScoreOptions) -> TaskScores:
    """Score a model on a task; the tasks of a group are put together.

    This is the harness's `evaluate`, as its `simple_evaluate` calls it; the latter also runs `pip list` and other
    programs to describe the machine, which takes longer than a small model.

    Args:
        model: what `open_model` gave.
        tasks: what `load_tasks` gave.

    Raises:
        UserError: an item does not fit into memory.
    """
    import torch
    from lm_eval import evaluate

    leaves = _leaves(name, tasks)
    own = {leaf: tasks["tasks"][leaf] for leaf in leaves}
    for task in own.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=_SEED)
    only: Any = {"tasks": own, "groups": {}, "group_map": {}}
    try:
        with _bars_on_terminals_only():
            found = evaluate(model, task_dict=only, limit=options.limit, bootstrap_iters=0, log_samples=True)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"the model and the task {name} do not fit into the memory of {options.device}",
            expected=f"weights and the logits of {options.batch_size} items",
            found=str(error).split(". ")[0],
            do="--batch-size 1, or --device cpu",
        ) from None
    assert found is not None
    return _collect(name, leaves, found)


def _leaves(name: str, tasks: Any) -> list[str]:
    """The tasks of a group, or the task itself."""
    children = tasks["group_map"].get(name)
    return [name] if children is None else [leaf for child in children for leaf in _leaves(child, tasks)]


def _collect(name: str, leaves: Sequence[str], found: Any) -> TaskScores:
    """The logged items of a task, or of all tasks of a group. Metrics that are not one number per item are left out."""
    items: list[str] = []
    metrics: dict[str, list[Score]] = {}
    higher: dict[str, bool] = {}
    for leaf in leaves:
        samples = found["samples"][leaf]
        first = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
        items += [f"{leaf} {s['doc_hash']} {s['prompt_hash']} {s['target_hash']}" for s in first]
        for metric in first[0]["metrics"]:
            scores = [sample[metric] for sample in first]
            if all(map(_is_score, scores)):
                metrics.setdefault(metric, []).extend(scores)
                higher[metric] = bool(found["higher_is_better"][leaf].get(metric, True))
    whole = {metric: scores for metric, scores in metrics.items() if len(scores) == len(items)}
    return TaskScores(name, items, whole, higher)


def _is_score(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) == 2 and all(isinstance(part, (int, float)) for part in value)
    return isinstance(value, (int, float))


@contextlib.contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """The harness draws progress bars on standard error, which fill a log file."""
    if sys.stderr.isatty():
        yield
    else:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
            yield


@contextlib.contextmanager
def _working_folder(folder: Path) -> Iterator[None]:
    """Work in a folder for the time of the block; without it, where the process is."""
    before = Path.cwd()
    if folder.is_dir():
        os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _is_local(name: str, folder: Path | None) -> bool:
    return folder is not None and (folder / f"{name}.yaml").is_file()


def _find_definitions() -> dict[str, Path]:
    """Name of each task and group of the harness -> the folder of its definition.

    The harness's own index parses 14,000 YAML files, which takes 17 s; this reads one line of each. A group's tasks
    are in its folder.
    """
    import lm_eval

    found: dict[str, Path] = {}
    for file in sorted((Path(lm_eval.__file__).parent / "tasks").rglob("*.yaml")):
        for name in re.findall(rb"^(?:task|group):[ \t]*['\"]?([\w.-]+)['\"]?[ \t]*$", file.read_bytes(), re.M):
            found.setdefault(name.decode(), file.parent)
    return found


def _unknown_task(name: str, known: Sequence[str]) -> UserError:
    import difflib

    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return UserError(
        f"unknown task {name!r}",
        expected=f"cloze, next_line, bits, or a task of the harness such as {KNOWN}",
        found=repr(name),
        do=f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all",
    )


def _missing_data(name: str, definition: Path | None, benchmarks: Path, error: Exception) -> UserError:
    """The error for a task whose data set cannot be loaded, with the commands that bring it."""
    wanted = _data_sets(definition) or ["OWNER/NAME"]
    here = [str(benchmarks / one) for one in wanted if (benchmarks / one).is_dir()]
    bring = "; ".join(
        f"huggingface-cli download {one} --repo-type dataset --local-dir {benchmarks / one}" for one in wanted
    )
    found = f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0][:200]}"
    if here:
        return UserError(
            f"the data of the task {name} cannot be read",
            expected=f"in {', '.join(here)}: the splits as Parquet files, of several configurations in CONFIG/SPLIT/",
            found=found,
            do=f"remove the folder, and on a machine with network: {bring} --revision refs/convert/parquet",
        )
    return UserError(
        f"the data of the task {name} are not on this machine",
        expected=f"{', '.join(str(benchmarks / one) for one in wanted)}, or a cache of `datasets` that holds them",
        found=found,
        do=f"on a machine with network: {bring}; then copy the folder here. Nothing is downloaded by evaluate itself",
    )


def _data_sets(definition: Path | None) -> list[str]:
    """The hub ids that the task's file, and the files beside it, name as dataset_path."""
    if definition is None:
        return []
    files = [definition, *sorted(definition.parent.rglob("*.yaml")), *sorted(definition.parent.glob("_*"))]
    for file in files:
        text = file.read_text(errors="replace") if file.is_file() else ""
        if names := re.findall(r"^dataset_path:\s*['\"]?([\w.-]+(?:/[\w.-]+)?)", text, re.M):
            return sorted(set(names))
    return []
