"""`launch.py evaluate MODEL --against BASE`: both models on the same items; table, JSON and the report's panel."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.checkpoint_files import check_undamaged, copy_by_links
from common.errors import UserError
from common.files import write_atomic
from common.hub import check_model_name
from common.json_files import read_json_object
from common.rundir import RunDir, checkpoint_step, existing_run, find_checkpoint
from report.evaluation import harness
from report.evaluation.comparison import Row, decide, make_row
from report.evaluation.held_out_text import default_domains, name_texts, read_domains, warn_of_training_text
from report.evaluation.local_tasks import CACHE, FAMILIES, build_tasks
from report.evaluation.request import EvaluateRequest
from report.evaluation.result import RESULT, Evaluation, find_exporting_run

log = logging.getLogger("launch")


def evaluate(request: EvaluateRequest) -> Evaluation:
    """Score the model, and the one it is compared with, and write the result.

    Raises:
        UserError: no such model, run, task or text; data that are not here; models with different tokenizers, or
            without a token that ends a document; the harness is not installed.
    """
    harness.check_installed()
    request.check()
    harness.go_offline()
    root = Path(request.runs)
    from convert.hf import fingerprint_model

    run, checkpoint = _run_of(request.model, root)
    against = _base_of(run) if request.against is None else request.against
    against = None if against in (None, "none") else against
    names, folder = _make_tasks(request, run)
    with contextlib.ExitStack() as stack:
        # by the checkpoint found above: the run may have saved another since
        paths = [stack.enter_context(_as_folder(str(checkpoint or request.model), root))]
        paths += [stack.enter_context(_as_folder(against, root))] if against else []
        options = _options(request, paths)
        tasks = harness.load_tasks(names, folder)
        digests = [fingerprint_model(path) for path in paths]
        # the base comes first: where the time is short, it is stored for the next checkpoint
        models = reversed(list(zip(paths, digests, strict=True)))
        scores = [_score(*model, tasks, names, options, folder) for model in models][::-1]
        how = {**asdict(options), "harness": f"lm_eval {harness.check_installed()}", "sha256": digests}
    step = checkpoint_step(checkpoint) if checkpoint is not None and run is not None else None
    name = str(run.checkpoints / f"step-{step}") if run is not None and step is not None else request.model
    found = Evaluation(name, against, step, how, _compare(*scores))
    path = request.output or _default_output(request, run, step)
    if path is not None:
        found.save(path)
        log.info("evaluation: %s", path)
    return found


def _make_tasks(request: EvaluateRequest, run: RunDir | None) -> tuple[list[str], Path | None]:
    """Names of all tasks, and the folder of those that are made here."""
    asked = [name.strip() for name in (request.tasks or ",".join(FAMILIES)).split(",") if name.strip()]
    families = [family for family in FAMILIES if family in asked]
    if not families:
        return asked, None
    texts = name_texts(request.text) if request.text else default_domains(run)
    domains = read_domains(texts)
    warn_of_training_text(texts.values(), run)
    folder, names = build_tasks(domains, families, CACHE, required=bool(request.tasks))
    log.info("tasks: %s, from the text of %s (%s)", ", ".join(names), ", ".join(texts.values()), folder)
    return [*names, *(name for name in asked if name not in FAMILIES)], folder


def _run_of(model: str, root: Path) -> tuple[RunDir | None, Path | None]:
    """The run that is meant, and its checkpoint; an exported folder is found in the runs' export.json."""
    path = Path(model)
    if (path / "config.json").is_file() or not (path.is_dir() or existing_run(model, root)):
        return find_exporting_run(path, root), None
    checkpoint = find_checkpoint(model, root)
    owner = checkpoint.resolve().parents[1]
    return (RunDir.at(checkpoint.parents[1]) if (owner / "spec.json").is_file() else None), checkpoint


def _base_of(run: RunDir | None) -> str | None:
    """The model that a run started from, if it is still there."""
    source = (read_json_object(run.base) or {}).get("source") if run is not None else None
    if not isinstance(source, str):
        return None
    try:
        check_model_name(source)
    except UserError:
        log.warning("evaluation: the base %s does not exist any more; --against names another", source)
        return None
    return source


@contextlib.contextmanager
def _as_folder(model: str, root: Path) -> Iterator[Path]:
    """The model as a Hugging Face folder: itself, or an export that is removed at the end of the block.

    Raises:
        UserError: the run deleted the checkpoint just now.
    """
    if (Path(model) / "config.json").is_file() or existing_run(model, root) is None:
        from convert.hf import fetch_model

        yield fetch_model(model)
        return
    from convert.export_hf import export_hf

    checkpoint = find_checkpoint(model, root)
    of_run = checkpoint.parent.name == "checkpoints"
    beside = checkpoint.resolve().parents[1] if of_run else checkpoint.parent
    with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=beside) as folder:
        log.info("evaluation: exporting %s", checkpoint)
        if of_run:  # a run that trains deletes its older checkpoints
            checkpoint = _copy(checkpoint, Path(folder) / checkpoint.name)
        check_undamaged(checkpoint)
        yield export_hf(checkpoint, Path(folder) / "model")


def _copy(checkpoint: Path, target: Path) -> Path:
    try:
        return copy_by_links(checkpoint, target)
    except (FileNotFoundError, shutil.Error) as error:
        if checkpoint.is_dir():
            raise
        raise UserError(
            f"{checkpoint} is gone",
            expected="a checkpoint that stays until it is read",
            found="its run has deleted it just now, after a newer one",
            do="the same command again, which takes the newest",
        ) from error


def _options(request: EvaluateRequest, paths: Sequence[Path]) -> harness.ScoreOptions:
    """The same for both models; checks that one tokenizer serves both.

    Raises:
        UserError: a tokenizer that is not the model's, or not the other model's.
    """
    import torch

    from convert.hf import HFFolder
    from data.tokenizer import eod_id, fingerprint, load_tokenizer, vocab_size

    prints = {}
    for path in paths:
        folder, tokenizer = HFFolder(path), load_tokenizer(str(path))
        eod_id(tokenizer)
        if vocab_size(tokenizer) > folder.arch.vocab_size:
            raise UserError(
                f"{path} has a tokenizer that is not its own",
                expected=f"ids below the model's {folder.arch.vocab_size:,}",
                found=f"{vocab_size(tokenizer):,} ids",
                do="copy the tokenizer's files of the model it was trained from into the folder",
            )
        prints[str(path)] = fingerprint(tokenizer)
    if len(set(prints.values())) > 1:
        raise UserError(
            "the two models have different tokenizers",
            expected="one tokenizer: continued training keeps the base model's",
            found=", ".join(f"{path}: {digest[:16]}" for path, digest in prints.items()),
            do="--against the model that this one was trained from, or --against none to score it by itself",
        )
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("there is no GPU", expected="a CUDA device", found="none", do="--device cpu")
    positions = [json.loads((path / "config.json").read_text())["max_position_embeddings"] for path in paths]
    return harness.ScoreOptions(
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        max_length=min(harness.LONGEST, *positions),
        batch_size=request.batch_size,
        limit=request.limit,
    )


def _score(
    path: Path, digest: str, tasks: Any, names: Sequence[str], options: harness.ScoreOptions, folder: Path | None
) -> list[harness.TaskScores]:
    """Score a model, or read what it scored before: the base is compared with every checkpoint of a run.

    The scores of a task that was made here are stored as soon as it is done.
    """
    model: Any = None
    found = []
    for name in names:
        key = json.dumps([digest, name, asdict(options), harness.check_installed()])
        stored = f"scores-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        cached = folder / stored if folder is not None and (folder / f"{name}.yaml").is_file() else None
        row = read_json_object(cached) if cached is not None else None
        if row is not None:
            found.append(harness.TaskScores(**row))
            continue
        if model is None:
            log.info("evaluation: scoring %s on %s (%s)", path, options.device, options.dtype)
            model = harness.open_model(path, options)
        found.append(harness.score(model, tasks, name, options))
        if cached is not None:
            write_atomic(cached, json.dumps(asdict(found[-1])))
    if model is None:
        log.info("evaluation: %s has been scored on these items before", path)
    return found


def _compare(model: Sequence[harness.TaskScores], base: Sequence[harness.TaskScores] | None = None) -> list[Row]:
    """One row per task and metric.

    Raises:
        UserError: the items are not the same.
    """
    rows = []
    for number, own in enumerate(model):
        other = base[number] if base is not None else None
        if other is not None and other.items != own.items:
            raise UserError(
                f"the two models were not scored on the same items of {own.name}",
                expected=f"{len(own.items)} equal items",
                found=f"{len(set(own.items) & set(other.items))} equal items",
                do=f"remove {CACHE} and evaluate again",
            )
        for metric, scores in own.metrics.items():
            base_scores = other.metrics[metric] if other is not None else None
            rows.append(make_row(own.name, metric, own.higher_is_better[metric], scores, base_scores))
    return decide(rows)


def _default_output(request: EvaluateRequest, run: RunDir | None, step: int | None) -> Path | None:
    """In the run, by step; of an exported folder in the folder itself."""
    if run is not None and step is not None:
        return run.evaluation(step)
    folder = Path(request.model)
    return folder / RESULT if (folder / "config.json").is_file() else None
