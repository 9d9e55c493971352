"""Start a run from a base model: import it, check it, restore it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import UserError
from common.rundir import RunDir
from data.manifest import load_manifest
from data.resolve_blend import domain_folders
from recipes.plan import Plan

if TYPE_CHECKING:
    import nemo_run as run

    from convert.tensor_map import Architecture

log = logging.getLogger("launch")
IMPORTED = Path("models/imported")  # base models in NeMo form, one folder a fingerprint


def start_from_base(partial: run.Partial, folder: RunDir, plan: Plan, *, write: bool = True) -> None:
    """Import the base model (once), check its shape, and have its weights restored with a fresh optimizer.

    Args:
        write: write base.json (one rank of a run does).

    Raises:
        UserError: the base cannot be imported, or its shape or tokenizer is not the recipe's and the corpora's.
    """
    import nemo_run as run
    from nemo import lightning as nl

    from convert.import_hf import import_once
    from convert.models import open_model

    base = partial.resume.base
    with _one_at_a_time(IMPORTED):
        checkpoint = import_once(base, IMPORTED)
    log.info("base: %s, imported as %s", base, checkpoint)
    _same_shape(plan, base, open_model(checkpoint).arch)
    _same_tokenizer(plan, base, checkpoint)
    partial.resume.restore_config = run.Config(
        nl.RestoreConfig, path=str(checkpoint), load_optim_state=False, load_artifacts=False
    )
    if not write:
        return
    folder.path.mkdir(parents=True, exist_ok=True)
    row = {"source": base, "checkpoint": str(checkpoint), "fingerprint": checkpoint.name}
    folder.base.write_text(json.dumps(row, indent=1) + "\n")


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """One rank imports, the others wait and find it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _same_shape(plan: Plan, base: str, found: Architecture) -> None:
    """Megatron fills a larger embedding with zeros and does not compare the RoPE base, both without a warning."""
    wanted = replace(found, **asdict(plan.shape), norm_eps=1e-6, rope_theta=1e6)
    if different := wanted.differences(found):
        raise UserError(
            "the base model is not of the recipe's shape",
            expected=f"{base} with the recipe's numbers (recipe, base): the same",
            found="; ".join(different),
            do="another base (resume.base=...), or the base's shape in recipes/qwen25.py",
        )


def _same_tokenizer(plan: Plan, base: str, checkpoint: Path) -> None:
    """Token ids of another tokenizer train without any error: the corpora must be made with the base model's own."""
    from data.tokenizer import fingerprint, load_tokenizer

    files = checkpoint / "hf" if (checkpoint / "hf").is_dir() else Path(base)
    own = fingerprint(load_tokenizer(str(files)))
    folders = domain_folders(plan.blend).values() if plan.blend is not None else [str(plan.data)]
    for folder in folders:
        found = load_manifest(Path(folder)).tokenizer
        if found.fingerprint != own:
            raise UserError(
                f"the corpus {folder} was not made with the base model's tokenizer",
                expected=f"fingerprint {own[:16]} ({base})",
                found=f"fingerprint {found.fingerprint[:16]} ({found.source})",
                do=f"python launch.py data prepare TEXT --output {folder} --tokenizer {base} --overwrite",
            )
