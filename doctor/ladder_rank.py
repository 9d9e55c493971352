"""One rank of one rung, in a process of its own: device, process group, all-reduce, model, bandwidth.

Forked from a server that has torch imported, so that a rung costs its own work only. Each step is written down
when it ends; what the libraries print goes to a file, from which the parent quotes.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from doctor.ladder import STEPS, Task


def main(task: Task, rank: int) -> None:
    """Go through the steps; the first that raises is the last line of rank-R.jsonl."""
    _redirect(task.folder / f"rank-{rank}.log")
    os.environ.update(task.env)
    with (task.folder / f"rank-{rank}.jsonl").open("w", buffering=1) as notes:
        run = _Rank(task, rank)
        for step in STEPS:
            start = time.perf_counter()
            try:
                found = getattr(run, step)()
            except Exception as problem:
                notes.write(json.dumps({"step": step, "error": f"{type(problem).__name__}: {problem}"}) + "\n")
                os._exit(1)
            notes.write(json.dumps({"step": step, "seconds": time.perf_counter() - start, "found": found}) + "\n")
    os._exit(0)


def _redirect(path: Path) -> None:
    """C libraries write to the descriptors: turn these, not sys.stdout."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


class _Rank:
    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.place = torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")

    def device(self) -> str:
        """Take the device and compute on it."""
        if self.task.device == "cuda":
            torch.cuda.set_device(self.place)
        ones = torch.ones(256, 256, device=self.place)
        if float((ones @ ones).sum()) != 256**3:
            raise RuntimeError(f"{self.place} computes wrongly")
        return torch.cuda.get_device_name(self.place) if self.task.device == "cuda" else socket.gethostname()

    def init(self) -> str:
        """Make the process group; with NCCL its communicator too, not only at the first collective."""
        dist.init_process_group(
            self.task.backend,
            store=self._store(),
            rank=self.rank,
            world_size=self.task.world_size,
            timeout=timedelta(seconds=self.task.timeout_s),
            device_id=self.place if self.task.backend == "nccl" else None,
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if self.task.backend == "nccl" else ""
        return f"{self.task.backend} {nccl}".strip()

    def _store(self) -> dist.TCPStore:
        """Where the ranks meet: rank 0 listens on a port that the system gives it, so that none can be taken."""
        told, world = self.task.folder / "port", self.task.world_size
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
            (self.task.folder / "port.new").write_text(str(store.port))
            (self.task.folder / "port.new").rename(told)
            return store
        while not told.exists():  # rank 0 may have failed: the parent's time limit ends this
            time.sleep(0.01)
        return dist.TCPStore("127.0.0.1", int(told.read_text()), world, timeout=timedelta(seconds=self.task.timeout_s))

    def all_reduce(self) -> str:
        """Sum known numbers over the ranks, and look at each of them."""
        steps = torch.arange(1_000_000, device=self.place, dtype=torch.float32) % 1000
        values = steps + self.rank
        dist.all_reduce(values)
        world = self.task.world_size
        wrong = int((values != world * steps + world * (world - 1) / 2).sum())
        if wrong:
            raise RuntimeError(f"all_reduce gave {wrong} wrong numbers of {values.numel()}")
        return f"{values.numel()} numbers right"

    def model(self) -> str:
        """A layer's step: forward, backward, its gradients reduced as data parallelism does."""
        torch.manual_seed(1)
        layer = torch.nn.Linear(512, 512).to(self.place)
        layer(torch.randn(64, 512, device=self.place)).square().mean().backward()
        before = layer.weight.grad.clone()
        dist.all_reduce(layer.weight.grad)
        if not torch.allclose(layer.weight.grad, before * self.task.world_size, rtol=1e-5):
            raise RuntimeError("gradients differ after the all-reduce")
        return "one layer forward and backward"

    def bandwidth(self) -> dict[str, float]:
        """Bytes of the tensor -> seconds of one all-reduce, the median of several."""
        return {str(size): self._time(size) for size in self.task.sizes}

    def _time(self, size: int) -> float:
        tensor = torch.ones(size // 4, device=self.place)
        times: list[float] = []
        for _ in range(8):
            self._settle()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            self._settle()
            times.append(time.perf_counter() - start)
            tensor.fill_(1.0)
        return sorted(times[2:])[3]

    def _settle(self) -> None:
        settle: Callable[[], None] = torch.cuda.synchronize if self.task.device == "cuda" else _nothing
        settle()


def _nothing() -> None: ...
