"""A written run to render, without NeMo."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common.rundir import RunDir
from common.spec import RunSpec
from launcher.cluster_file import Cluster
from launcher.executors import Job


def job(
    cluster: Cluster | None, name: str = "my-run", root: Path = Path("runs"), retries: int = 0, **changes: Any
) -> Job:
    """A job with these fields of Job; of its spec only the number of retries is set."""
    folder = RunDir(name, root)
    given: dict[str, Any] = {
        "folder": folder,
        "logs": folder.attempt(1),
        "env": {"NCCL_DEBUG": "WARN", "no_proxy": "a b; $(touch canary)", "CUDA_VISIBLE_DEVICES": "0"},
        "devices": 2,
        "num_nodes": 1,
        "accelerator": "gpu",
        "cluster": cluster,
        "dryrun": True,
        "rank_command": ("python", "-m", "launcher.rank_main", str(folder.path)),
        "resume_command": f"python launch.py --recipe qwen25_tiny --name {name} --resume",
    }
    if retries:
        given["resolved"] = SimpleNamespace(spec=RunSpec(recipe="qwen25_tiny", retries=retries))
    given |= changes
    given["env"] = {**given["env"], **(cluster.env if cluster else {})}  # as the launcher merges them
    return Job(**given)
