"""Before the first step: are all ranks about to do the same work, with the same software, on the same data?"""

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
from common.rundir import code_version
from training.distributed import lost_ranks as peers

log = logging.getLogger("launch")

PACKAGES = ("nemo_toolkit", "megatron-core", "nemo_run", "lightning", "transformers", "transformer_engine")
CLOCK_WARN_S, CLOCK_REFUSE_S = 2.0, 60.0
_declared: dict[str, str] = {}


def declare(config: str, manifests: Mapping[str, object]) -> None:
    """What this rank is about to train: its resolved configuration, and the corpora (folder -> manifest) it sees."""
    _declared["configuration"] = _hash(config)
    for folder, manifest in manifests.items():
        sizes = sorted((file.name, file.stat().st_size) for file in Path(folder).glob("*.*") if file.is_file())
        _declared[f"data in {folder}"] = _hash(json.dumps([manifest, sizes], sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def facts() -> dict[str, str]:
    """What must be the same in every rank."""
    versions = {name: _version(name) for name in PACKAGES}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        "NCCL": nccl,
        "code": code_version(),
        **_declared,
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def check() -> None:
    """Meet the other ranks of the process group that was just made, and compare.

    Raises:
        PreflightError: a rank differs, its clock is far off, or the VCCL that was asked for is not loaded.
    """
    check_vccl(os.environ)
    seconds = peers.limit_waiting()
    if dist.get_world_size() == 1:
        return
    rank = dist.get_rank()
    dist.barrier()
    row = {"facts": facts(), "clock": time.time(), "peer": asdict(peers.open_door(rank))}
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    everyone = [peers.Peer(**one["peer"]) for one in rows]
    compare(everyone, [one["facts"] for one in rows])
    compare_clocks(everyone, [one["clock"] for one in rows])
    peers.meet(everyone)
    if rank == 0:
        hosts = len({one.host for one in everyone})
        log.info(
            "ranks: %d on %d host(s), alike in data, configuration, code and versions; %d s for a lost one (%s)",
            *(len(rows), hosts, seconds, TIMEOUT_KEY),
        )


def compare(everyone: Sequence[peers.Peer], rows: Sequence[Mapping[str, str]]) -> None:
    """The rows are alike.

    Raises:
        PreflightError: naming what differs, and in which ranks.
    """
    told = []
    for name in sorted({name for row in rows for name in row}):
        values = [row.get(name, "none") for row in rows]
        usual = max(set(values), key=lambda value: (values.count(value), value == values[0]))
        odd = [f"{peer} has {value}" for peer, value in zip(everyone, values, strict=True) if value != usual]
        if odd:
            told.append((name, usual, "; ".join(odd[:4]) + (f"; and {len(odd) - 4} more" if len(odd) > 4 else "")))
    if told:
        raise PreflightError(
            "the ranks are not alike: " + ", ".join(name for name, _, _ in told),
            expected="; ".join(f"{name} {usual}" for name, usual, _ in told),
            found="; ".join(f"{name}: {odd}" for name, _, odd in told),
            do="the same container, checkout and prepared data on every node",
        )


def compare_clocks(everyone: Sequence[peers.Peer], clocks: Sequence[float]) -> None:
    """The clocks agree, as far as one meeting tells (unix seconds, read right after a barrier).

    Raises:
        PreflightError: one is more than a minute off: logs and checkpoints could not be put in order.
    """
    middle = sorted(clocks)[len(clocks) // 2]
    off = [(clock - middle, peer) for clock, peer in zip(clocks, everyone, strict=True)]
    far = [f"{peer}: {seconds:+.0f} s" for seconds, peer in off if abs(seconds) > CLOCK_WARN_S]
    if any(abs(seconds) > CLOCK_REFUSE_S for seconds, _ in off):
        raise PreflightError(
            "the clocks of the ranks disagree",
            expected=f"within {CLOCK_REFUSE_S:.0f} s",
            found="; ".join(far),
            do="chronyc makestep, or timedatectl set-ntp true, on that host",
        )
    if far and everyone[0].rank == dist.get_rank():
        log.warning("clocks: %s (from the middle one; logs will not line up)", "; ".join(far))


def check_vccl(environ: Mapping[str, str]) -> None:
    """The library that `--env vccl` found is the one in this process.

    Raises:
        PreflightError: it is not.
    """
    wanted = environ.get("VCCL_LIBRARY", "")
    if wanted and wanted in environ.get("LD_PRELOAD", "") and (other := vccl.other_nccl_in_memory(wanted)):
        raise PreflightError(
            "VCCL is not loaded in this rank",
            expected=wanted,
            found=other,
            do="start ranks with the run's environment: LD_PRELOAD is read when a process starts",
        )
