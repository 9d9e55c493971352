"""What every rank of `launch.py doctor --cluster FILE` runs: `python -m doctor.node_rank doctor-runs/NAME`.

The first rank of each node checks its machine; then the nodes measure the links between them, one pair at a time, and
rank 0 shows one row for each node.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from common import logs, machine_facts, rank_states
from common.environment import vccl
from common.environment.sets import BACKEND_KEY
from common.errors import EXIT_RUN, PreflightError, ProjectError
from common.rank_states import RankState
from common.rundir import RunDir
from doctor.checks import run_checks
from doctor.network import check_network
from training.distributed.rank_env import RankInfo, read_rank, set_torchrun_variables

log = logging.getLogger("launch")
_MIB = {"cuda": 64, "cpu": 8}  # size of the tensor that crosses a link
_REPEATS = 4
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class NodeReport:
    """One node: what its first rank found.

    Args:
        network: interfaces and ports that are up, with their speed.
        problems: checks that failed; such a run would fail.
    """

    host: str
    gpus: str
    library: str
    network: str
    warnings: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """One direction between the first ranks of two nodes."""

    source: str
    target: str
    gb_per_s: float


def main(argv: list[str]) -> int:
    """One rank from start to end.

    Returns:
        its exit code: 0, 3 if a check failed on a node, 1 if the ranks could not communicate.
    """
    folder = RunDir.at(argv[0])
    rows = json.loads(folder.env.read_text())
    vccl.start_again_with_vccl(vccl.asked_library(rows), os.environ)
    for row in rows:
        if row["key"] not in vccl.PRELOADS:
            os.environ.setdefault(row["key"], row["value"])
    where = read_rank(os.environ, 1)
    set_torchrun_variables(os.environ, where)
    attempt = folder.attempt(folder.spec().attempt + where.restarts)
    attempt.mkdir(parents=True, exist_ok=True)
    logs.log_to_console(where.rank, attempt / "console.log")
    RankState(rank=where.rank).write(attempt)
    try:
        vccl.check_mapped(vccl.asked_library(rows))
        _check_nodes(where, folder)
    except Exception as error:
        code = error.exit_code if isinstance(error, ProjectError) else EXIT_RUN
        text = error.explain() if isinstance(error, ProjectError) else traceback.format_exc()
        RankState(rank=where.rank, state=rank_states.FAILED, exit_code=code, error=text).write(attempt)
        return code
    RankState(rank=where.rank, state=rank_states.DONE).write(attempt)
    return 0


def _check_nodes(where: RankInfo, folder: RunDir) -> None:
    """Check this node, connect all ranks, measure, and show the result on rank 0.

    Raises:
        PreflightError: on every rank, if a check failed on a node.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", where.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = os.environ.get(BACKEND_KEY) or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(backend, timeout=_TIMEOUT)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if int(total.item()) != where.world_size:
        raise RuntimeError(f"all_reduce over {where.world_size} ranks gave {total.item()}")
    first = where.local_rank == 0
    rows: list[NodeReport | None] = [None] * where.world_size
    dist.all_gather_object(rows, _report_node(where, backend) if first else None)
    leaders = [rank for rank, row in enumerate(rows) if row is not None]
    nodes = [row for row in rows if row is not None]
    links = _measure_links(where.rank, leaders, [node.host for node in nodes], device)
    if where.rank == 0:
        _show(nodes, links, backend)
        found = {"nodes": [asdict(node) for node in nodes], "links": [asdict(link) for link in links], "mode": backend}
        (folder.path / "nodes.json").write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    if problems := [f"{node.host}: {problem}" for node in nodes for problem in node.problems]:
        raise PreflightError("checks failed: " + "; ".join(problems), do="follow the advice of `doctor` on that node")


def _report_node(where: RankInfo, backend: str) -> NodeReport:
    import torch

    gpus = machine_facts.query_gpus().visible
    checks = [*run_checks(where.local_world_size if gpus else None), *check_network()]
    checks = [check for check in checks if check.name != "port"]  # these ranks use it
    up = [
        f"{c.name.split()[-1]} {c.found}" for c in checks if c.name.startswith(("network", "RDMA")) and _is_up(c.found)
    ]
    version = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else ""
    return NodeReport(
        host=socket.gethostname(),
        gpus=f"{len(gpus)} x {gpus[0].name}" if gpus else "none",
        library=f"nccl {version}, {vccl.describe_loaded()}" if backend == "nccl" else backend,
        network="; ".join(up),
        warnings=sum(check.level == "warning" for check in checks),
        problems=tuple(f"{check.name}: {check.found}" for check in checks if check.level == "error"),
    )


def _is_up(found: str) -> bool:
    return found.startswith(("up", "ACTIVE"))


def _measure_links(rank: int, leaders: list[int], hosts: list[str], device: object) -> list[Link]:
    """Each node sends to the next one, one pair at a time; the last one to the first. The same list on every rank.

    Args:
        leaders: the first rank of each node.
        device: where the tensors are.
    """
    import torch
    import torch.distributed as dist

    pairs = list(zip(leaders, leaders[1:] + leaders[:1], strict=True)) if len(leaders) > 1 else []
    tensor = torch.ones(_MIB[torch.device(str(device)).type] * 2**18, device=torch.device(str(device)))
    seconds: list[float] = []
    for source, target in pairs:
        dist.barrier()
        taken = [0.0]
        if rank in (source, target):
            taken = [_time_transfer(tensor, rank == source, target if rank == source else source)]
        dist.broadcast_object_list(taken, src=source)
        seconds.append(taken[0])
    names = {leader: host for leader, host in zip(leaders, hosts, strict=True)}
    size = tensor.numel() * tensor.element_size()
    return [
        Link(names[source], names[target], size / taken / 1e9)
        for (source, target), taken in zip(pairs, seconds, strict=True)
    ]


def _time_transfer(tensor: object, is_source: bool, peer: int) -> float:
    """Seconds of one transfer to `peer`, the mean of several after one that connects; each is acknowledged."""
    import torch
    import torch.distributed as dist

    assert isinstance(tensor, torch.Tensor)
    answer, start = torch.zeros(1, device=tensor.device), 0.0
    for repeat in range(_REPEATS + 1):
        if repeat == 1:
            start = time.perf_counter()
        if is_source:
            dist.send(tensor, peer)
            dist.recv(answer, peer)
        else:
            dist.recv(tensor, peer)
            dist.send(answer, peer)
        answer.item()  # waits for the GPU
    return (time.perf_counter() - start) / _REPEATS


def _show(nodes: list[NodeReport], links: list[Link], backend: str) -> None:
    """One row for each node, the slowest link, and the way to communicate in one word."""
    table = Table("node", "GPUs", "library", "network", "link to the next node", "checks", title="nodes of the cluster")
    for number, node in enumerate(nodes):
        link = f"{links[number].target}: {links[number].gb_per_s:.2f} GB/s" if links else "only one node"
        state = f"{len(node.problems)} error(s), {node.warnings} warning(s)"
        table.add_row(f"{number} {node.host}", node.gpus, node.library, node.network, link, state)
    text = io.StringIO()
    Console(file=text, width=140).print(table)
    log.info("doctor:\n%s", text.getvalue().rstrip())
    if links:
        slowest = min(links, key=lambda link: link.gb_per_s)
        log.info("slowest link: %s -> %s, %.2f GB/s", slowest.source, slowest.target, slowest.gb_per_s)
    log.info("mode: %s", backend)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
