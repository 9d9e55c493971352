"""Compare the memory estimate of recipes/memory.py with torch.cuda.max_memory_reserved, in one JSON line.

    python -m bench.memory --recipe qwen25_500m_dual [--plain] trainer.devices=1 data.micro_batch_size=8
    torchrun --nproc-per-node 2 -m bench.memory --recipe qwen25_500m_dual

Rank 0 prints; with pipeline parallelism every rank does. The options are those of bench.throughput.
"""

from __future__ import annotations

import dataclasses
import json
import os

from bench.throughput import build_recipe, recipe_parser, train_and_time
from launcher import batch_size
from recipes import memory


def main() -> None:
    """Train a few steps and print estimate and peak."""
    parser = recipe_parser(__doc__ or "")
    parser.set_defaults(warmup=3, steps=3)
    args = parser.parse_intermixed_args()
    plan, partial = build_recipe(args)
    gpus = batch_size.gpus_of_this_machine(plan)
    path: memory.Path = gpus.path if gpus else "fast"
    if args.plain and path != "sdpa":
        path = "plain"
    estimate = dataclasses.replace(memory.estimate(plan, path), validation=0.0)  # these steps are not validated
    measured = train_and_time(partial, 0.0)
    row = {
        "rank": int(os.environ.get("RANK", "0")),
        "path": path,
        "micro_batch_size": plan.micro_batch_size,
        "seq_length": plan.seq_length,
        "estimate_gib": estimate.reserved_gib,
        "peak_gib": measured.get("peak_gib"),
        "parts": str(estimate),
    }
    if row["peak_gib"]:
        row["estimate_over_peak"] = estimate.reserved_gib / row["peak_gib"]
    if row["rank"] == 0 or plan.pipeline_parallel > 1:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
