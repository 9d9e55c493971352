"""Checks before NeMo is imported: pure Python over the plan, the corpus and the machine. All findings at once."""

from __future__ import annotations

import ast
import ctypes
import ctypes.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from data.blend import chosen
from data.indexed import check_prefix, read_index
from data.manifest import FILE_NAME, SPLITS, load_manifest
from recipes.plan import Plan
from runtime.errors import PreflightError, ProjectError, UserError
from runtime.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Finding:
    """An error (the run cannot start) or a warning (it can, but look)."""

    problem: ProjectError
    fatal: bool = True


def check(plan: Plan, run: RunDir) -> list[Finding]:
    """Everything that can be known to be wrong before NeMo is imported."""
    checks: list[Callable[[Plan, RunDir], Iterator[Finding]]] = [
        _packages,
        _accelerator,
        _numbers,
        _schedule,
        _corpus,
        _base,
        _disk,
    ]
    return [finding for one in checks for finding in one(plan, run)]


def _error(what: str, *, expected: str, found: str, do: str) -> Finding:
    return Finding(PreflightError(what, expected=expected, found=found, do=do))


def _warning(what: str, *, expected: str, found: str, do: str) -> Finding:
    return Finding(UserError(what, expected=expected, found=found, do=do), fatal=False)


def _packages(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """`recipes` and `data` are common names: another package of that name on sys.path would be imported instead."""
    for name in ("recipes", "data", "runtime", "ops"):
        module = sys.modules.get(name)
        origin = Path(getattr(module, "__file__", None) or ROOT / name / "__init__.py").resolve()
        if origin.parent.parent != ROOT:
            yield _error(
                f"package {name!r} is shadowed",
                expected=str(ROOT / name),
                found=str(origin.parent),
                do="run launch.py from its own folder, and take the other one out of PYTHONPATH",
            )


def _gpu_count() -> int:
    """GPUs the CUDA driver reports, without importing torch; CUDA_VISIBLE_DEVICES is honoured. 0 without a driver."""
    try:
        cuda = ctypes.CDLL(ctypes.util.find_library("cuda") or "libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _accelerator(plan: Plan, run: RunDir) -> Iterator[Finding]:
    if plan.accelerator != "gpu":
        return
    count = _gpu_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = f"{count} GPU(s)" + (f" with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else "")
    if count == 0:
        yield _error(
            "this recipe needs a GPU",
            expected=f"{plan.devices} NVIDIA GPU(s) with a working driver",
            found=where,
            do="python launch.py --recipe qwen25_tiny (the same path on the CPU), or check nvidia-smi",
        )
    elif count < plan.devices:
        yield _error(
            "fewer GPUs than the recipe asks for",
            expected=f"trainer.devices={plan.devices}",
            found=where,
            do=f"trainer.devices={count}, or make more GPUs visible",
        )


def _numbers(plan: Plan, run: RunDir) -> Iterator[Finding]:
    positive = ["seq_length", "micro_batch_size", "global_batch_size", "max_steps", "devices", "num_nodes"]
    positive += ("val_check_interval", "log_every_n_steps", "save_every_n_steps", "keep_checkpoints")
    for name in positive:
        if getattr(plan, name) < 1:
            yield _error(
                f"{name} must be positive", expected="1 or more", found=str(getattr(plan, name)), do=f"fix {name}"
            )
            return
    world, model = plan.devices * plan.num_nodes, plan.tensor_parallel * plan.pipeline_parallel * plan.context_parallel
    if world % model:
        yield _error(
            "devices do not divide into model-parallel groups",
            expected="devices x nodes divisible by TP x PP x CP",
            found=f"{world} devices, TP x PP x CP = {model}",
            do="change trainer.devices or the parallel sizes",
        )
        return
    share = plan.micro_batch_size * plan.data_parallel
    product = f"micro batch {plan.micro_batch_size} x data parallel {plan.data_parallel} = {share}"
    if plan.global_batch_size % share:
        fits = max(share, plan.global_batch_size // share * share)
        yield _error(
            "the global batch is not divisible",
            expected=f"a multiple of {product}",
            found=f"data.global_batch_size={plan.global_batch_size}",
            do=f"data.global_batch_size={fits}, or another data.micro_batch_size",
        )
    if plan.seq_length != plan.model_seq_length:
        yield _error(
            "the data's sequence length is not the model's",
            expected=f"data.seq_length = model.config.seq_length = {plan.model_seq_length} tokens",
            found=f"data.seq_length = {plan.seq_length} tokens",
            do=f"set both: data.seq_length={plan.seq_length} model.config.seq_length={plan.seq_length}",
        )
    yield from _shape(plan)


def _shape(plan: Plan) -> Iterator[Finding]:
    shape = plan.shape
    for whole, part, text in (
        (shape.hidden_size, shape.num_attention_heads, "hidden size not divisible by attention heads"),
        (shape.num_attention_heads, shape.num_query_groups, "attention heads not divisible by query groups"),
    ):
        if whole % part:
            yield _error(text, expected=f"a multiple of {part}", found=str(whole), do="change the shape in recipes/")


def _schedule(plan: Plan, run: RunDir) -> Iterator[Finding]:
    for name, value, override in (
        ("warm-up", plan.warmup_steps, "optim.lr_scheduler.warmup_steps"),
        ("validation interval", plan.val_check_interval, "trainer.val_check_interval"),
    ):
        if value > plan.max_steps:
            yield _warning(
                f"the {name} is longer than the run",
                expected=f"at most trainer.max_steps={plan.max_steps} steps",
                found=f"{value} steps: " + ("the peak is never reached" if name == "warm-up" else "no validation"),
                do=f"{override}={max(1, plan.max_steps // 10)}",
            )


def _corpus(plan: Plan, run: RunDir) -> Iterator[Finding]:
    if plan.blend is not None:
        if plan.data is not None:
            yield _error(
                "two descriptions of the training data",
                expected="data.paths or data.blend",
                found=f"data.paths={plan.data} and data.blend",
                do="leave data.paths out; data.blend=FILE.yaml names other corpora (docs/05-schedules.md)",
            )
        yield from _blend(plan)
        return
    try:
        prefixes = _prefixes(plan.data or "")
    except (KeyError, AttributeError, TypeError):
        yield _error(
            "data.paths is not of NeMo's form",
            expected="a prepared folder, or {'train': ['1.0', 'PREFIX'], 'validation': [...], 'test': [...]}",
            found=str(plan.data),
            do="give data.paths the folder that data prepare wrote",
        )
        return
    if prefixes is None:
        folder = Path(plan.data or "")
        if not (folder / FILE_NAME).is_file():
            yield _error(
                f"no prepared corpus in {folder}",
                expected=f"{folder}/{FILE_NAME} with train, validation and test",
                found="no such folder" if not folder.exists() else "a folder without a manifest",
                do=_how_to_prepare(folder),
            )
            return
        yield from _manifest(plan, folder)
        prefixes = {split: [folder / split] for split in SPLITS}
    for name in ("validation", "test"):
        for prefix in set(prefixes.get(name, [])) & set(prefixes["train"]):
            yield _error(
                f"{prefix} is training data and also in {name}",
                expected=f"a {name} split the model is not trained on",
                found=f"the same prefix in data.paths['train'] and data.paths['{name}']",
                do="launch.py data prepare writes disjoint splits",
            )
    for split, some in prefixes.items():
        for prefix in some:
            broken = [Finding(problem) for problem in check_prefix(prefix)]
            yield from broken or _samples(plan, split, prefix)


def _blend(plan: Plan) -> Iterator[Finding]:
    """Every domain is a prepared corpus of one tokenizer; shares and epochs make sense."""
    assert plan.blend is not None
    try:
        trained, folders = chosen(plan.blend, plan.replay_share, plan.max_steps * plan.tokens_per_step)
    except ProjectError as problem:
        yield Finding(problem)
        return
    if plan.keep_best is not None and plan.keep_best not in folders:
        yield _error(
            "log.ckpt.keep_best is no domain of the blend",
            expected="one of " + ", ".join(folders),
            found=repr(plan.keep_best),
            do="log.ckpt.keep_best=None, or a domain's name",
        )
    for text in trained.warnings:
        yield _warning(text, expected="4 epochs or fewer", found=text, do="fewer steps, another weight, or more text")
    for folder in map(Path, folders.values()):
        yield from _manifest(plan, folder)
        for split in ("train", "validation"):
            yield from _samples(replace(plan, max_steps=1), split, folder / split)


def _prefixes(paths: str) -> dict[str, list[Path]] | None:
    """NeMo's own form of data.paths, `{"train": [weight, prefix, ...], ...}`; None for a prepared folder."""
    try:
        value = ast.literal_eval(paths)
    except (ValueError, SyntaxError):
        return None
    if not isinstance(value, dict):
        return None
    if not all(isinstance(value[split], list) for split in SPLITS):
        raise TypeError(value)
    return {
        split: [Path(word) for word in words if not word.replace(".", "", 1).isdigit()]
        for split, words in value.items()
    }


def _manifest(plan: Plan, folder: Path) -> Iterator[Finding]:
    try:
        manifest = load_manifest(folder)
    except ProjectError as problem:
        yield Finding(problem)
        return
    size, vocab = manifest.tokenizer.vocab_size, plan.shape.vocab_size
    if size > vocab:
        yield _error(
            "the corpus's tokenizer is larger than the model's vocabulary",
            expected=f"at most {vocab} ids (model.config.vocab_size)",
            found=f"{size} ids in {folder}/tokenizer",
            do="prepare the corpus with the model's own tokenizer",
        )


def _how_to_prepare(folder: Path) -> str:
    if "sample" in folder.parts:
        return "python launch.py data sample"
    return f"python launch.py data prepare INPUT --output {folder} --tokenizer Qwen/Qwen2.5-0.5B"


def _samples(plan: Plan, split: str, prefix: Path) -> Iterator[Finding]:
    """One sample is seq_length + 1 tokens; a shorter split repeats itself in silence, or loops for ever."""
    tokens = read_index(prefix).num_tokens
    if tokens < plan.seq_length + 1:
        yield _error(
            f"the {split} split is shorter than one sequence",
            expected=f"at least {plan.seq_length + 1} tokens (data.seq_length + 1)",
            found=f"{tokens} tokens in {prefix}.bin",
            do=f"add data, give {split} a larger share with --split, or lower data.seq_length",
        )
    elif split == "train" and plan.max_steps * plan.tokens_per_step > 4 * tokens:
        yield _warning(
            "the run reads its corpus more than four times",
            expected=f"at most 4 epochs of {tokens:,} tokens",
            found=f"{plan.max_steps * plan.tokens_per_step / tokens:.1f} epochs",
            do="fewer steps (trainer.max_steps), or more data",
        )


def _base(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """The base model's shape and tokenizer, as far as a local folder tells without torch."""
    if plan.base is None or run.whole_checkpoints():
        return
    config = Path(plan.base) / "config.json"
    if not config.is_file():
        if not Path(plan.base).is_dir() and plan.base.count("/") == 1 and plan.base[0] not in "./~":
            return  # a hub id: looked up when it is imported
        tiny = Path(plan.base).name == "qwen25-tiny"
        yield _error(
            f"no base model in {plan.base}",
            expected="a Hugging Face folder with config.json and safetensors",
            found="no such folder" if not Path(plan.base).exists() else "a folder without config.json",
            do="make demo trains and exports it" if tiny else "resume.base=FOLDER or a hub id",
        )
        return
    hf = json.loads(config.read_text())
    names = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size"}
    names |= {"num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads"}
    names |= {"vocab_size": "vocab_size", "tied": "tie_word_embeddings"}
    for ours, theirs in names.items():
        if theirs in hf and hf[theirs] != getattr(plan.shape, ours):
            yield _error(
                f"the base model has another {ours}",
                expected=f"{getattr(plan.shape, ours)} (the recipe's shape)",
                found=f"{hf[theirs]} ({theirs} in {config})",
                do="another base (resume.base=...), or the base's shape in recipes/",
            )


def _disk(plan: Plan, run: RunDir) -> Iterator[Finding]:
    parent = next(p for p in (run.path, *run.path.absolute().parents) if p.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as problem:
        yield _error(
            f"cannot write {run.path}",
            expected=f"a folder where files can be made: {parent}",
            found=problem.strerror or str(problem),
            do="change its rights, or run from another folder",
        )
        return
    # one more than is kept: a new checkpoint is whole before an old one goes
    kept = plan.keep_checkpoints + bool(plan.keep_best)
    need, free = plan.checkpoint_bytes * (kept + 1), shutil.disk_usage(parent).free
    if need > free:
        yield _error(
            "not enough disk for the checkpoints",
            expected=f"{need / 2**30:.1f} GiB ({kept} kept and one in the making)",
            found=f"{free / 2**30:.1f} GiB free under {parent}",
            do="free some space, or log.ckpt.keep_last=1",
        )
