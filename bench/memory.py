"""The memory estimate against the card: recipes/memory.py and torch.cuda.max_memory_allocated, in one JSON line.

    python -m bench.memory --recipe qwen25_500m_dual [--plain] trainer.devices=1 data.micro_batch_size=8
    torchrun --nproc-per-node 2 -m bench.memory --recipe qwen25_500m_dual

Of rank 0; with a pipeline the other stages print theirs too. The options are those of bench.throughput.
"""

from __future__ import annotations

import importlib.util
import json
import os

from bench.throughput import _partial, _run, arguments
from recipes import memory, overrides, registry
from runtime import env


def main() -> None:
    """Train a few steps and print estimate and peak."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--env", help="environment set; default: the recipe's")
    parser.add_argument("--plain", action="store_true", help="stock NeMo and Megatron, no lever")
    parser.add_argument("--profile", help="write a kernel table of three more steps to this file")
    parser.set_defaults(warmup=3, steps=3)
    args = parser.parse_intermixed_args()
    recipe = registry.resolve(args.recipe)
    env.apply(args.env or recipe.plan.env, os.environ, overrides.early(recipe.plan, args.overrides))
    partial = _partial(recipe, args)
    plan = recipe.plan.as_resolved(partial)
    path: memory.Path = "plain" if args.plain else "fast"
    if importlib.util.find_spec("transformer_engine") is None:
        path = "sdpa"
    estimate, measured = memory.estimate(plan, path), _run(partial, 0.0)
    row = {
        "rank": int(os.environ.get("RANK", "0")),
        "path": path,
        "micro_batch_size": plan.micro_batch_size,
        "seq_length": plan.seq_length,
        "estimate_gib": estimate.allocated_gib,
        "peak_gib": measured.get("peak_gib"),
        "reserved_gib": measured.get("reserved_gib"),
        "parts": str(estimate),
    }
    if row["peak_gib"]:
        row["estimate_over_peak"] = estimate.allocated_gib / row["peak_gib"]
    if row["rank"] == 0 or plan.pipeline_parallel > 1:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
