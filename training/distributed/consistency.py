"""Checks before the first step that all ranks have the same configuration, software, data and time."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.environment import vccl
from common.environment.sets import TIMEOUT_KEY
from common.errors import PreflightError
from common.version import code_version
from training.distributed.lost_ranks import Peer, set_collective_timeout, start_server, watch_peers

log = logging.getLogger("launch")

_PACKAGES = ("nemo_toolkit", "megatron-core", "nemo_run", "lightning", "transformers", "transformer_engine")
_CLOCK_WARN_S, _CLOCK_REFUSE_S = 2.0, 60.0
_run_facts: dict[str, str] = {}


def record_run_facts(config: str, manifests: Mapping[str, object]) -> None:
    """Add this run's configuration and data to the facts that `check_ranks` compares.

    Args:
        config: the resolved configuration as YAML.
        manifests: folder -> manifest.json of each corpus, as this rank sees it. The sizes of its files count too.
    """
    _run_facts["configuration"] = _hash(config)
    for folder, manifest in manifests.items():
        sizes = sorted((file.name, file.stat().st_size) for file in Path(folder).glob("*.*") if file.is_file())
        _run_facts[f"data in {folder}"] = _hash(json.dumps([manifest, sizes], sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def collect_facts() -> dict[str, str]:
    """Name -> value of everything that must be the same in every rank."""
    versions = {name: _version(name) for name in _PACKAGES}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        "NCCL": nccl,
        "code": code_version(),
        **_run_facts,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check_ranks() -> None:
    """Compare all ranks of the process group that was just made, then start to watch for lost ones.

    Raises:
        PreflightError: a rank differs, its clock is far off, or the VCCL that the environment set names is not loaded.
    """
    check_vccl(os.environ)
    timeout_s = set_collective_timeout()
    if dist.get_world_size() == 1:
        return
    rank = dist.get_rank()
    dist.barrier()
    row = {"facts": collect_facts(), "clock": time.time(), "peer": asdict(start_server(rank))}
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    peers = [Peer(**row["peer"]) for row in rows]
    compare_facts(peers, [row["facts"] for row in rows])
    compare_clocks(peers, [row["clock"] for row in rows])
    watch_peers(peers)
    if rank == 0:
        hosts = len({peer.host for peer in peers})
        log.info(
            "ranks: %d on %d host(s) agree in data, configuration, code and versions; a lost one ends the run"
            " within %d s (%s)",
            *(len(rows), hosts, timeout_s, TIMEOUT_KEY),
        )


def compare_facts(peers: Sequence[Peer], facts: Sequence[Mapping[str, str]]) -> None:
    """Check that all ranks have the same facts.

    Args:
        peers: the ranks, for the error.
        facts: what `collect_facts` returned in each of them, in the same order.

    Raises:
        PreflightError: naming each fact that differs, the value that most ranks have, and the ranks with another one.
    """
    differences = []
    for name in sorted({name for row in facts for name in row}):
        values = [row.get(name, "none") for row in facts]
        usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
        odd = [f"{peer} has {value}" for peer, value in zip(peers, values, strict=True) if value != usual]
        if odd:
            text = "; ".join(odd[:4]) + (f"; and {len(odd) - 4} more" if len(odd) > 4 else "")
            differences.append((name, usual, text))
    if differences:
        raise PreflightError(
            "the ranks are not alike: " + ", ".join(name for name, _, _ in differences),
            expected="; ".join(f"{name} {usual}" for name, usual, _ in differences),
            found="; ".join(f"{name}: {text}" for name, _, text in differences),
            do="use the same container, checkout and prepared data on every node",
        )


def compare_clocks(peers: Sequence[Peer], clocks: Sequence[float]) -> None:
    """Check that the clocks agree (unix seconds, read right after a barrier).

    Raises:
        PreflightError: one is more than a minute off, so that logs and checkpoints could not be put in order.
    """
    median = sorted(clocks)[len(clocks) // 2]
    offsets = [(clock - median, peer) for clock, peer in zip(clocks, peers, strict=True)]
    far = [f"{peer}: {seconds:+.0f} s" for seconds, peer in offsets if abs(seconds) > _CLOCK_WARN_S]
    if any(abs(seconds) > _CLOCK_REFUSE_S for seconds, _ in offsets):
        raise PreflightError(
            "the clocks of the ranks disagree",
            expected=f"within {_CLOCK_REFUSE_S:.0f} s",
            found="; ".join(far),
            do="run `chronyc makestep`, or `timedatectl set-ntp true`, on that host",
        )
    if far and peers[0].rank == dist.get_rank():
        log.warning("clocks: %s from the median clock; times in the logs will not match", "; ".join(far))


def check_vccl(environ: Mapping[str, str]) -> None:
    """Check that this process has loaded the library that `--env vccl` found.

    Raises:
        PreflightError: it has loaded another one.
    """
    wanted = environ.get("VCCL_LIBRARY", "")
    if wanted and wanted in environ.get("LD_PRELOAD", "") and (loaded := vccl.other_nccl_in_memory(wanted)):
        raise PreflightError(
            "VCCL is not loaded in this rank",
            expected=wanted,
            found=loaded,
            do="start the ranks with the run's environment: LD_PRELOAD is read when a process starts",
        )
