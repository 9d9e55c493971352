"""Open any model that this package can compare or export from."""

from __future__ import annotations

from pathlib import Path

from common.rundir import existing_run, find_checkpoint
from convert.hf import CONFIG, HFFolder, fetch_model
from convert.nemo import NeMoCheckpoint, is_checkpoint

Model = HFFolder | NeMoCheckpoint


def open_model(name: Path | str) -> Model:
    """Open a NeMo checkpoint folder, a Hugging Face folder, a hub id, or the newest checkpoint of a run.

    Raises:
        UserError: no such model, or one that is not supported or incomplete.
    """
    path = Path(name).expanduser()
    if is_checkpoint(path):
        return NeMoCheckpoint(path)
    if not (path / CONFIG).is_file() and existing_run(name):
        return NeMoCheckpoint(find_checkpoint(name))
    return HFFolder(fetch_model(str(name)))
