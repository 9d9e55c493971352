"""One rank of a transport's test, in a process of its own: device, process group, all-reduce, model, bandwidth.

It is forked from a server that has imported torch already, so that a test takes only its own time. Each step is
recorded when it ends; what the libraries print goes to a log file, which the parent quotes from.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from common.environment import vccl
from doctor.transports import STEPS, RankTask


def main(task: RankTask, rank: int) -> None:
    """Run the steps; one that raises is recorded as the last line of rank-R.jsonl, and ends the process."""
    _redirect_output(task.folder / f"rank-{rank}.log")
    os.environ.update(task.env)
    with (task.folder / f"rank-{rank}.jsonl").open("w", buffering=1) as records:
        test = _RankTest(task, rank)
        for step in STEPS:
            start = time.perf_counter()
            try:
                found = getattr(test, step)()
            except Exception as problem:
                records.write(json.dumps({"step": step, "error": f"{type(problem).__name__}: {problem}"}) + "\n")
                os._exit(1)
            records.write(json.dumps({"step": step, "seconds": time.perf_counter() - start, "found": found}) + "\n")
    os._exit(0)


def _redirect_output(path: Path) -> None:
    """Redirect the file descriptors, because C libraries do not write to sys.stdout."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


class _RankTest:
    """The steps of `STEPS`, as methods of these names; each returns what it found."""

    def __init__(self, task: RankTask, rank: int) -> None:
        self._task, self._rank = task, rank
        self._device = torch.device(task.device, rank) if task.device == "cuda" else torch.device("cpu")

    def device(self) -> str:
        """Select the device and compute on it."""
        if self._task.device == "cuda":
            torch.cuda.set_device(self._device)
        ones = torch.ones(256, 256, device=self._device)
        if float((ones @ ones).sum()) != 256**3:
            raise RuntimeError(f"{self._device} computes wrong results")
        return torch.cuda.get_device_name(self._device) if self._task.device == "cuda" else socket.gethostname()

    def init(self) -> str:
        """Create the process group, with NCCL its communicator too (otherwise the first collective creates it)."""
        dist.init_process_group(
            self._task.backend,
            store=self._create_store(),
            rank=self._rank,
            world_size=self._task.world_size,
            timeout=timedelta(seconds=self._task.timeout_s),
            device_id=self._device if self._task.backend == "nccl" else None,
        )
        if self._task.backend != "nccl":
            return self._task.backend
        version = torch.cuda.nccl.version()
        return f"nccl {'.'.join(map(str, version))}, {vccl.describe_loaded()}"

    def _create_store(self) -> Store:
        """The store through which the ranks find each other: rank 0 listens on a free port of the system's choice."""
        port_file, world = self._task.folder / "port", self._task.world_size
        if self._rank == 0:
            store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
            (self._task.folder / "port.new").write_text(str(store.port))
            (self._task.folder / "port.new").rename(port_file)
            return store
        while not port_file.exists():  # if rank 0 failed, the parent's time limit ends this loop
            time.sleep(0.01)
        timeout = timedelta(seconds=self._task.timeout_s)
        return TCPStore("127.0.0.1", int(port_file.read_text()), world, timeout=timeout)

    def all_reduce(self) -> str:
        """Sum known numbers over the ranks, and check every one of them."""
        numbers = torch.arange(1_000_000, device=self._device, dtype=torch.float32) % 1000
        values = numbers + self._rank
        dist.all_reduce(values)
        world = self._task.world_size
        wrong = int((values != world * numbers + world * (world - 1) / 2).sum())
        if wrong:
            raise RuntimeError(f"all_reduce gave {wrong} wrong numbers of {values.numel()}")
        return f"{values.numel()} numbers right"

    def model(self) -> str:
        """Forward and backward of one layer, its gradients reduced as data parallelism does."""
        torch.manual_seed(1)
        layer = torch.nn.Linear(512, 512).to(self._device)
        layer(torch.randn(64, 512, device=self._device)).square().mean().backward()
        gradient = layer.weight.grad
        assert gradient is not None
        before = gradient.clone()
        dist.all_reduce(gradient)
        if not torch.allclose(gradient, before * self._task.world_size, rtol=1e-5):
            raise RuntimeError("gradients differ after the all-reduce")
        return "one layer forward and backward"

    def bandwidth(self) -> dict[str, float]:
        """Bytes of the tensor -> seconds of one all-reduce, the median of several."""
        return {str(size): self._time_all_reduce(size) for size in self._task.sizes}

    def _time_all_reduce(self, size: int) -> float:
        tensor = torch.ones(size // 4, device=self._device)
        times: list[float] = []
        for _ in range(8):
            self._synchronize()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            self._synchronize()
            times.append(time.perf_counter() - start)
            tensor.fill_(1.0)
        return sorted(times[2:])[3]

    def _synchronize(self) -> None:
        if self._task.device == "cuda":
            torch.cuda.synchronize()
