"""Preflight of what a run reads: corpora, blends and the base model. Imports neither torch nor NeMo."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from common.errors import ProjectError
from common.hub import is_hub_id
from common.json_files import read_json_object
from common.rundir import RunDir
from data.blend_math import EPOCHS_CAP
from data.block_hashes import find_changed_block
from data.indexed import check_prefix, read_index
from data.manifest import SPLITS, Manifest, load_manifest
from data.resolve_blend import load_run_blend
from data.stages import resolve_boundaries
from launcher.preflight.findings import Finding, error, warning
from recipes.forgetting import check_budget
from recipes.plan import Plan
from recipes.qwen25 import QWEN25_500M, TINY
from recipes.stages import resolve_plan_stages, run_length


def check_corpora(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """Check that the training data exists, is complete and long enough, and is no validation data."""
    if plan.blend is not None:
        if plan.data is not None:
            yield error(
                "two descriptions of the training data",
                expected="data.paths or data.blend",
                found=f"data.paths={plan.data} and data.blend",
                do="leave data.paths out; data.blend=FILE.yaml names other corpora (docs/blend.md)",
            )
        if not any(check_blend(plan, run)):  # a finding of its own
            yield from _check_blend(plan)
        return
    try:
        prefixes = _prefixes(plan.data or "")
    except (KeyError, AttributeError, TypeError):
        yield error(
            "data.paths is not of NeMo's form",
            expected="a prepared folder, or {'train': ['1.0', 'PREFIX'], 'validation': [...], 'test': [...]}",
            found=str(plan.data),
            do="give data.paths the folder that data prepare wrote",
        )
        return
    if prefixes is None:
        folder = Path(plan.data or "")
        if missing := _find_missing([folder]):
            yield from missing
            return
        yield from _check_manifest(plan, folder)
        prefixes = {split: [folder / split] for split in SPLITS}
    for name in ("validation", "test"):
        for prefix in set(prefixes.get(name, [])) & set(prefixes["train"]):
            yield error(
                f"{prefix} is training data and also in {name}",
                expected=f"a {name} split the model is not trained on",
                found=f"the same prefix in data.paths['train'] and data.paths['{name}']",
                do="launch.py data prepare writes disjoint splits",
            )
    for split, some in prefixes.items():
        for prefix in some:
            broken = [Finding(problem) for problem in check_prefix(prefix)]
            yield from broken or _check_length(plan, split, prefix)


def check_blend(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """Check the description of the blend, its budget and the ends of its stages, for which no corpus is needed."""
    if isinstance(plan.blend, str) and not Path(plan.blend).exists():
        return  # a file that is only where the run trains
    try:
        blend = None if plan.blend is None else load_run_blend(plan.blend)
        check_budget(plan, blend)
        if blend is not None:
            resolve_boundaries(blend.stages, run_length(plan))
    except ProjectError as problem:
        yield Finding(problem)


def _check_blend(plan: Plan) -> Iterator[Finding]:
    """Check that every domain is a prepared corpus of one tokenizer, and that shares and epochs make sense."""
    assert plan.blend is not None
    try:
        blend = load_run_blend(plan.blend)
        if missing := _find_missing([domain.folder for domain in blend.domains]):
            yield from missing
            return
        resolved = resolve_plan_stages(plan)
        trained, folders = resolved.blend, resolved.folders
    except ProjectError as problem:
        yield Finding(problem)
        return
    if plan.keep_best is not None and plan.keep_best not in folders:
        yield error(
            "log.ckpt.keep_best is no domain of the blend",
            expected="one of " + ", ".join(folders),
            found=repr(plan.keep_best),
            do="log.ckpt.keep_best=None, or a domain's name",
        )
    for text in trained.warnings:
        yield warning(text, expected="4 epochs or fewer", found=text, do="fewer steps, another weight, or more text")
    for folder in map(Path, folders.values()):
        yield from _check_manifest(plan, folder)
        watched = str(folder) in {str(domain.folder) for domain in trained.validated_only if domain.role == "watch"}
        for split in ("validation",) if watched else ("train", "validation"):
            yield from _check_length(replace(plan, max_steps=1), split, folder / split)


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


def _check_blocks(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    """Compare a few MiB of each .bin with the hashes that were recorded when the corpus was prepared."""
    for split, facts in manifest.splits.items():
        path = folder / f"{split}.bin"
        if check_prefix(folder / split):  # a finding of its own
            continue
        if (changed := find_changed_block(path, facts.bin_blocks)) is not None:
            yield error(
                f"{path} is not as it was prepared",
                expected="the bytes whose hashes manifest.json holds",
                found=f"other bytes in the MiB from byte {changed:,} on",
                do="copy the corpus again, or prepare it again with --overwrite; look at the disk (dmesg)",
            )


def _check_manifest(plan: Plan, folder: Path) -> Iterator[Finding]:
    try:
        manifest = load_manifest(folder)
    except ProjectError as problem:
        yield Finding(problem)
        return
    yield from _check_blocks(folder, manifest)
    size, vocab = manifest.tokenizer.vocab_size, plan.shape.vocab_size
    if size > vocab:
        yield error(
            "the corpus's tokenizer is larger than the model's vocabulary",
            expected=f"at most {vocab} ids (model.config.vocab_size)",
            found=f"{size} ids in {folder}/tokenizer",
            do="prepare the corpus with the model's own tokenizer",
        )


def _find_missing(folders: Sequence[Path]) -> list[Finding]:
    """Find the folders that hold no prepared corpus: all of them, not only the first."""
    findings = []
    for folder in folders:
        try:
            load_manifest(folder)
        except ProjectError as problem:
            do = "python launch.py data sample" if folder.parts[:2] == ("corpora", "sample") else problem.do
            findings.append(error(problem.what, expected=problem.expected, found=problem.found, do=do))
    return findings


def _check_length(plan: Plan, split: str, prefix: Path) -> Iterator[Finding]:
    """Check that a split holds one sample (seq_length + 1 tokens): Megatron repeats a shorter one or loops for ever."""
    tokens = read_index(prefix).num_tokens
    if tokens < plan.seq_length + 1:
        yield error(
            f"the {split} split is shorter than one sequence",
            expected=f"at least {plan.seq_length + 1} tokens (data.seq_length + 1)",
            found=f"{tokens} tokens in {prefix}.bin",
            do=f"add data, give {split} a larger share with --split, or lower data.seq_length",
        )
    elif split == "train" and plan.max_steps * plan.tokens_per_step > EPOCHS_CAP * tokens:
        yield warning(
            f"the run reads its corpus more than {EPOCHS_CAP:g} times",
            expected=f"at most {EPOCHS_CAP:g} epochs of {tokens:,} tokens",
            found=f"{plan.max_steps * plan.tokens_per_step / tokens:.1f} epochs",
            do="fewer steps (trainer.max_steps), or more data",
        )


def check_base_model(plan: Plan, run: RunDir) -> Iterator[Finding]:
    """Check the base model's shape against the recipe's, as far as its config.json tells."""
    if plan.base is None or run.complete_checkpoints():
        return
    config = Path(plan.base) / "config.json"
    if not config.is_file():
        if is_hub_id(plan.base):
            return  # downloaded when the ranks import it
        hub = "resume.base=Qwen/Qwen2.5-0.5B, or a folder" if plan.shape == QWEN25_500M else "resume.base=FOLDER"
        own = "resume.base=models/qwen25-tiny, which make demo trains and exports"
        yield error(
            f"no base model in {plan.base}",
            expected="a Hugging Face folder with config.json and safetensors",
            found="no such folder" if not Path(plan.base).exists() else "a folder without config.json",
            do=own if plan.shape == TINY else hub,
        )
        return
    hf = read_json_object(config)
    if hf is None:
        yield error(
            f"{config} cannot be read",
            expected="the JSON object that a Hugging Face model has",
            found="no JSON, or JSON that is nested too deeply",
            do="download the model again",
        )
        return
    names = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size"}
    names |= {"num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads"}
    names |= {"vocab_size": "vocab_size", "tied": "tie_word_embeddings"}
    for ours, theirs in names.items():
        if theirs in hf and hf[theirs] != getattr(plan.shape, ours):
            yield error(
                f"the base model has another {ours}",
                expected=f"{getattr(plan.shape, ours)} (the recipe's shape)",
                found=f"{hf[theirs]} ({theirs} in {config})",
                do="another base (resume.base=...), or the base's shape in recipes/",
            )
