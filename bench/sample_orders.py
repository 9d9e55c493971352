"""How fast samples are read in Megatron's order and in that of the token ledger, in one process, in alternation.

Reading a sample takes a hundred times as long as finding out which one comes next, and varies by more than that. So
both are measured: whole samples, and the order alone, with every sample read from its corpus in no time.

python -m bench.sample_orders --corpora corpora/sample --out samples.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

SHARES = {"code": 1.0, "prose": 1.0}


def build_dataset(corpora: Path, cache: str, order: str, args: argparse.Namespace) -> Any:
    """The training samples of a blend of three quarters code and one quarter prose, in one of the two orders."""
    from data.module import PreparedDataModule

    domains = [
        {"name": name, "folder": str(corpora / name), "role": role}
        for name, role in (("code", "new"), ("prose", "replay"))
    ]
    data = PreparedDataModule(
        blend={"domains": domains, "replay_share": 0.25},
        stages=[{"name": "all", "first": 0, "replay_share": 0.25, "within": SHARES, "order": order}],
        seq_length=args.seq_length,
        micro_batch_size=4,
        global_batch_size=args.global_batch_size,
        index_mapping_dir=cache,
    )
    data.trainer = types.SimpleNamespace(global_step=0)
    steps = args.rounds * args.steps
    data.build(steps, steps, 1, 1)
    return data._train_ds


def time_reading(dataset: Any, first: int, samples: int) -> float:
    """Microseconds of CPU time per sample."""
    start = time.process_time()
    for number in range(first, first + samples):
        dataset[number]
    return (time.process_time() - start) / samples * 1e6


def time_rounds(megatron: Any, ledger: Any, rounds: int, samples: int) -> list[tuple[float, float]]:
    """Microseconds per sample of both in each round; which of them is read first changes from round to round."""
    found = []
    for number in range(rounds):
        first, second = (megatron, ledger) if number % 2 else (ledger, megatron)
        times = [time_reading(dataset, number * samples, samples) for dataset in (first, second)]
        found.append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Read the same number of samples of both orders in each round; the ratio is that of each round.

    Returns:
        microseconds per sample: `megatron_us_per_sample` and `ledger_us_per_sample` whole (median of the rounds),
        `megatron_order_us` and `ledger_order_us` for the order alone (mean: the ledger's is laid out thousands of
        samples at a time); `order_share` is their difference over `megatron_us_per_sample`.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as cache:
        megatron, ledger = (build_dataset(args.corpora, cache, order, args) for order in ("megatron", "ledger"))
        samples = args.steps * args.global_batch_size
        for dataset in (megatron, ledger):  # fill the page cache
            time_reading(dataset, 0, args.rounds * samples)
        times = time_rounds(megatron, ledger, args.rounds, samples)
        sample = megatron[0]
        with mock.patch.object(GPTDataset, "__getitem__", lambda self, index: sample):
            alone = time_rounds(megatron, ledger, args.rounds, samples)
    order = [statistics.mean(column) for column in zip(*alone, strict=True)]
    ratios = [ledger_us / megatron_us for megatron_us, ledger_us in times]
    whole = [statistics.median(column) for column in zip(*times, strict=True)]
    return {
        "megatron_us_per_sample": whole[0],
        "ledger_us_per_sample": whole[1],
        "megatron_order_us": order[0],
        "ledger_order_us": order[1],
        "order_share": (order[1] - order[0]) / whole[0],
        "ratio": statistics.median(ratios),
        "ratio_of_rounds": [round(one, 3) for one in (min(ratios), *statistics.quantiles(ratios), max(ratios))],
    }


def main() -> None:
    """Parse the arguments, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", type=Path, default=Path("corpora/sample"))
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    print(json.dumps(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
