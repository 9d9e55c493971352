"""Hugging Face Accelerate: `torchrun --nproc-per-node 2 docs/examples/accelerate_train.py` (or `accelerate launch`)."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Fit y = 3x; Accelerate divides the batches among the ranks."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).reshape(-1, 1)
    model, loader = torch.nn.Linear(1, 1), DataLoader(TensorDataset(x, 3 * x), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(60):
        for inputs, wanted in loader:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            optimizer.step()
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.print(f"{accelerator.num_processes} ranks: weight {weight:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
