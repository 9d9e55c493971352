"""All-reduce by size over every way that ranks on this machine can talk: `python -m bench.collectives`.

It starts its own ranks. One JSON line a way on standard output; bandwidth is the bus bandwidth of nccl-tests.
"""

from __future__ import annotations

import argparse
import json
import sys

from common import logs, machine_facts
from doctor import ladder

SIZES_GPU, SIZES_CPU = "1,4,16,64,256,1024", "1,4,16,64"


def main(argv: list[str]) -> int:
    """Measure; returns 0 if at least one way works."""
    parser = argparse.ArgumentParser(prog="python -m bench.collectives", description=__doc__)
    parser.add_argument("--devices", type=int, help="ranks; default: the GPUs here, or 2 CPU ranks")
    parser.add_argument("--mib", help=f"sizes; default {SIZES_GPU} on GPUs, {SIZES_CPU} on CPUs")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a way may take")
    words = parser.parse_args(argv)
    logs.silence_child_processes()
    gpus = len(machine_facts.query_gpus().visible)
    ranks = words.devices or gpus or 2
    if gpus and ranks > gpus:
        parser.error(f"--devices {ranks}: there are {gpus} GPU(s)")
    mib = tuple(float(size) for size in (words.mib or (SIZES_GPU if gpus else SIZES_CPU)).split(","))
    worked = False
    for rung in ladder.rungs(gpus, ranks):
        result = ladder.attempt(rung, words.limit, mib)
        worked |= not result.failed
        print(json.dumps(row(result)), flush=True)
    return 0 if worked else 1


def row(result: ladder.Result) -> dict[str, object]:
    """One way as a flat record: sizes in MiB, times in ms, bandwidth in GB/s (1e9)."""
    return {
        "way": result.rung.name,
        "env": {key: value for key, (value, _) in result.rung.env.items()},
        "ranks": result.rung.world_size,
        "device": result.found.get("device"),
        "library": result.found.get("init"),
        "failed": result.failed,
        "why": result.why,
        "ms": {f"{size / 2**20:g}": round(1e3 * seconds, 4) for size, seconds in result.seconds.items()},
        "bus_gb_s": {f"{size / 2**20:g}": round(rate, 3) for size, rate in result.bandwidth.items()},
        "gradients_0_5b_s": None if result.step_s is None else round(result.step_s, 4),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
