"""Names of models and tokenizers: a local folder, or an id of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from common.commands import launch_command
from common.errors import UserError

OWN_FOLDERS = ("models", "corpora", "runs")  # where this project keeps its own, so that no hub id begins with them


def is_hub_id(name: str) -> bool:
    """OWNER/NAME, and neither a folder that exists nor one of this project's own folders."""
    owner = name.split("/")[0]
    return name.count("/") == 1 and name[0] not in "./~" and owner not in OWN_FOLDERS and not Path(name).is_dir()


def check_model_name(name: str) -> None:
    """Check, before anything is imported, that a name can be a model.

    Raises:
        UserError: it is neither a folder that exists nor a hub id.
    """
    path = Path(name).expanduser()
    if path.is_dir() or is_hub_id(name):
        return
    tiny = path.name == "qwen25-tiny"
    near = sorted(str(one.parent) for one in path.parent.glob("*/config.json")) if path.parent.is_dir() else []
    own = f"; export a run there: {launch_command('convert', 'export', 'RUN', name)}"
    raise UserError(
        f"no Hugging Face model at {name}",
        expected="a folder with config.json and safetensors, or a hub id such as Qwen/Qwen2.5-0.5B",
        found="no such folder" + (f"; {', '.join(near)} exist" if near else ""),
        do="make demo, which trains and exports it" if tiny else "correct the path" + own,
    )
