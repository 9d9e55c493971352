"""Records in the run directory what a run reads: data.json (manifests of the corpora) and blend.json (their shares)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from common.files import write_atomic
from common.rundir import RunDir
from data.manifest import FILE_NAME
from data.resolve_blend import domain_folders
from data.resolve_stages import ResolvedStages
from launcher.stages import find_blend_change
from recipes.plan import Plan
from recipes.stages import resolve_plan_stages

if TYPE_CHECKING:
    import nemo_run as run

log = logging.getLogger("launch")


def manifests(partial: run.Partial) -> dict[str, dict[str, object]]:
    """Folder -> content of its manifest.json, for every prepared corpus that the run reads.

    Raises:
        ProjectError: the blend cannot be read, or a corpus that it names is not prepared.
    """
    if partial.data.blend is not None:
        folders = list(domain_folders(partial.data.blend).values())
    else:
        folders = [partial.data.paths] if isinstance(partial.data.paths, str) else []
    found = [Path(folder) for folder in folders if (Path(folder) / FILE_NAME).is_file()]
    return {str(folder): json.loads((folder / FILE_NAME).read_text()) for folder in found}


def log_blend(plan: Plan) -> ResolvedStages | None:
    """Log what the blend and its stages come to over the whole run.

    Returns:
        the same as values; None for a run without a blend.

    Raises:
        ProjectError: the blend cannot be read, or a corpus that it names is not prepared.
    """
    if plan.blend is None:
        return None
    resolved = resolve_plan_stages(plan)
    for line in resolved.table():
        log.info("blend: %s", line)
    return resolved


def write(partial: run.Partial, plan: Plan, folder: RunDir) -> None:
    """Write data.json and, for a blend, blend.json; log what the blend comes to over the whole run.

    This happens where the corpora are: in the launcher if the run trains on its machine, else in rank 0. data.json
    also holds each corpus's `absolute_path`, so that the passport finds it from any folder.

    Raises:
        ProjectError: the blend cannot be read, or a corpus that it names is not prepared.
    """
    if (resolved := log_blend(plan)) is not None:
        write_atomic(folder.blend, resolved.to_json(changed_at_step=find_blend_change(partial)))
    rows = {
        name: {**manifest, "absolute_path": str(Path(name).absolute())} for name, manifest in manifests(partial).items()
    }
    write_atomic(folder.data, json.dumps(rows) + "\n")
