"""Plain PyTorch DDP: `torchrun --nproc-per-node 2 docs/examples/ddp.py`, on GPUs with NCCL, elsewhere with Gloo."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Fit y = 3x with one share of the samples per rank."""
    gpu = torch.cuda.is_available()
    # the two variables of this project's sets that no library reads by itself
    backend = os.environ.get("CPT_PROCESS_GROUP_BACKEND", "nccl" if gpu else "gloo")
    timeout = timedelta(seconds=int(os.environ.get("CPT_PROCESS_GROUP_TIMEOUT_S", "600")))
    dist.init_process_group(backend, timeout=timeout)  # rank, world size and address are torchrun's
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)[dist.get_rank() :: dist.get_world_size()].to(device)
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), 3 * x)
        loss.backward()  # DDP averages the gradients of all ranks here
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {backend}: weight {model.module.weight.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
