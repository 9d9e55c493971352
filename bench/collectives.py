"""All-reduce by size over every transport of this machine: `python -m bench.collectives`.

It starts its own ranks. One JSON line per transport on standard output; bandwidth is the bus bandwidth of nccl-tests.
"""

from __future__ import annotations

import argparse
import json
import sys

from common import logs, machine_facts
from doctor.transport_check import check_transport
from doctor.transports import TransportResult, list_transports

SIZES_GPU, SIZES_CPU = "1,4,16,64,256,1024", "1,4,16,64"


def main(argv: list[str]) -> int:
    """Measure every transport; returns 0 if at least one works."""
    parser = argparse.ArgumentParser(prog="python -m bench.collectives", description=__doc__)
    parser.add_argument("--devices", type=int, help="number of ranks; default: all visible GPUs, or 2 CPU ranks")
    parser.add_argument("--mib", help=f"tensor sizes; default {SIZES_GPU} on GPUs, {SIZES_CPU} on CPUs")
    parser.add_argument("--limit", type=float, default=120.0, help="time limit of one transport, in seconds")
    args = parser.parse_args(argv)
    logs.silence_child_processes()
    gpus = len(machine_facts.query_gpus().visible)
    ranks = args.devices or gpus or 2
    if gpus and ranks > gpus:
        parser.error(f"--devices {ranks}: there are {gpus} GPU(s)")
    mib = tuple(float(size) for size in (args.mib or (SIZES_GPU if gpus else SIZES_CPU)).split(","))
    any_works = False
    for transport in list_transports(gpus, ranks):
        result = check_transport(transport, args.limit, mib)
        any_works |= not result.failed
        print(json.dumps(to_record(result)), flush=True)
    return 0 if any_works else 1


def to_record(result: TransportResult) -> dict[str, object]:
    """One transport as a flat record: sizes in MiB, times in ms, bandwidth in GB/s (1e9)."""
    return {
        "way": result.transport.name,
        "env": {key: value for key, (value, _) in result.transport.env.items()},
        "ranks": result.transport.world_size,
        "device": result.found.get("device"),
        "library": result.found.get("init"),
        "failed": result.failed,
        "why": result.why,
        "ms": {f"{size / 2**20:g}": round(1e3 * seconds, 4) for size, seconds in result.seconds.items()},
        "bus_gb_s": {f"{size / 2**20:g}": round(rate, 3) for size, rate in result.bandwidth.items()},
        "gradients_0_5b_s": None if result.gradient_seconds is None else round(result.gradient_seconds, 4),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
