"""Measure how fast a recipe trains, on real prepared data, with the truth gates on.

    python -m bench.throughput --recipe qwen25_500m_single [--env SET] [--plain] [path=value ...]

Prints one JSON object: unmasked tokens per second (wall clock over all timed steps, one synchronization before and
one after), step time p50 and p99 in seconds, MFU relative to the GPU's own measured bf16 matrix rate with the FLOPs
of bench/flops.py, peak memory in GiB, seconds from process start to the end of the first step.
Several GPUs: `torchrun --nproc-per-node 2 -m bench.throughput ... trainer.devices=2`; rank 0 prints.
`--plain` switches every speed lever off: stock NeMo and Megatron.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def base_parser(description: str) -> argparse.ArgumentParser:
    """The options that this benchmark and bench.peer_hf share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--warmup", type=int, default=8, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--losses", action="store_true", help="also print the loss of every step")
    parser.add_argument("--wait", action="store_true", help="import, then wait for a line on standard input")
    parser.add_argument("overrides", nargs="*", help="path=value")
    return parser


def wait_for_turn(wait: bool) -> float:
    """With --wait: print READY after the imports, and wait for a line on standard input; returns the seconds waited."""
    if not wait:
        return 0.0
    start = time.perf_counter()
    print("READY", flush=True)
    sys.stdin.readline()
    return time.perf_counter() - start


def recipe_parser(description: str) -> argparse.ArgumentParser:
    """The options of `base_parser`, and those of a benchmark that trains a recipe."""
    parser = base_parser(description)
    parser.add_argument("--env", help="environment set; default: the recipe's")
    parser.add_argument("--plain", action="store_true", help="stock NeMo and Megatron, without speed levers")
    parser.add_argument("--profile", help="write a kernel table of three more steps to this file")
    return parser


def main() -> None:
    """Run one recipe and print its figures."""
    args = recipe_parser(__doc__ or "").parse_intermixed_args()
    plan, partial = build_recipe(args)
    waited = wait_for_turn(args.wait)
    result = add_plan_figures(train_and_time(partial, waited), plan)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


def build_recipe(args: argparse.Namespace) -> tuple[Any, Any]:
    """Set the environment and build the recipe as `launch.py` does, with a clock and without checkpoints.

    Returns:
        the resolved plan, and the recipe.
    """
    from common.environment.merge import apply_environment, complete_name
    from common.environment.sets import BACKEND_KEY
    from common.load_nemo import load_nemo
    from common.spec import RunSpec
    from recipes.overrides import apply_to_recipe
    from recipes.resolve import resolve

    resolved = resolve(RunSpec(recipe=args.recipe, overrides=tuple(args.overrides)))
    apply_environment(complete_name(args.env, resolved.plan.environment_set), os.environ, resolved.plan)
    resolved = resolved.with_spec(process_group_backend=os.environ.get(BACKEND_KEY))
    plan = resolved.plan
    load_nemo()

    import nemo_run as run

    from bench.clock import TimingCallback
    from recipes.build import adapt, collectives

    partial = resolved.recipe.build(plan)
    for line in [*adapt.adapt(partial, speed=not args.plain), *collectives.adapt(partial, plan)]:
        print(line, file=sys.stderr)
    for line in apply_to_recipe(partial, resolved.overrides, resolved.recipe.plan):
        print("override", line, file=sys.stderr)
    total = args.warmup + args.steps + 10
    partial.trainer.max_steps = total
    partial.trainer.val_check_interval = partial.log.ckpt.every_n_train_steps = 10 * total
    partial.trainer.limit_val_batches = 0
    clock = run.Config(TimingCallback, warmup=args.warmup, steps=args.steps, losses=args.losses, profile=args.profile)
    partial.trainer.callbacks.append(clock)
    return plan.as_resolved(partial), partial


def train_and_time(partial: Any, waited: float) -> dict[str, Any]:
    """Train until all steps are timed; returns the figures. `waited` as in StopWatch."""
    import fiddle as fdl

    from bench.clock import MeasurementDone, TimingCallback
    from common.rundir import RunDir
    from launcher.build import set_run_directory

    with tempfile.TemporaryDirectory() as folder:
        set_run_directory(partial, RunDir("run", Path(folder)), attempt=1)
        Path(folder, "run").mkdir()
        job = fdl.build(partial)
        clock = next(c for c in job.keywords["trainer"].callbacks if isinstance(c, TimingCallback))
        try:
            job()
        except MeasurementDone:
            return clock.result(waited)
    raise RuntimeError("the run ended before all steps were timed")


def add_plan_figures(result: dict[str, Any], plan: Any) -> dict[str, Any]:
    """Add the batch, and on a GPU the MFU."""
    from bench.flops import flops_per_token
    from bench.gpu_rates import measure_matmul_tflops

    result |= {
        "parameters": plan.shape.num_parameters,
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
    }
    if plan.accelerator == "gpu":
        rate = measure_matmul_tflops()
        per_gpu = result["tokens_per_second"] / result.get("data_parallel", 1)
        used = per_gpu * flops_per_token(plan.shape, plan.seq_length) / 1e12
        result |= {"card_tflops": rate, "mfu_of_card": used / rate}
    return result


if __name__ == "__main__":
    main()
