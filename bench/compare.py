"""Our recipe, stock NeMo and the fastest of the transformers peers on the same model, measured in one call.

Its tables are in docs/measurements/one-gpu-throughput.md and docs/measurements/cpu-throughput.md.

    python -m bench.compare [--case NAME ...] [--rounds 2] [--skip-stock] [--fp8] [--peers compile,liger]
        [--peer-path PATH] [--json FILE]
    python -m bench.compare --case "1.3M on the CPU" --rounds 5

Each case runs stock NeMo once, then our recipe and the peers (the variants of bench.peer_hf; on a CPU they are the
same) alternately `--rounds` times, each in a process of its own; the table has the fastest peer and its name, and a
variant that cannot run is named below it. `--fp8` measures our recipe with FP8 products as well. Imports overlap,
measurements do not; on the CPU imports do not overlap either, because they would slow the measurement. Throughput is
the median of the rounds, memory the largest. All but the CPU case need one GPU and a prepared corpus in corpora/mine.
`--peer-path` is the PYTHONPATH of a peer with another version of transformers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.peer_hf import VARIANTS
from bench.turns import measure_in_turns

_REDUCED_12_GROUPS = ["--recipe", "qwen25_500m_single", "model.config.num_query_groups=12"]
_SEQ_1024 = ["data.seq_length=1024", "model.config.seq_length=1024"]
_FP8 = ["speed.fp8=True", "speed.fp8_lm_head=True"]
# name: (recipe and shape, micro batch, micro batch of stock NeMo, global batch, timed steps)
CASES = {
    "306M, global batch 4": (["--recipe", "qwen25_500m_single"], 4, 1, 4, 200),
    "318M, 8 x 4": (_REDUCED_12_GROUPS, 8, 8, 32, 20),
    "318M, 16 x 4": (_REDUCED_12_GROUPS, 16, 16, 64, 10),
    "494M tied, 8 x 4": (["--recipe", "qwen25_500m"], 8, 8, 32, 10),
    "494M tied, 32 x 16, seq 1024": (
        ["--recipe", "qwen25_500m", *_SEQ_1024],
        32,
        8,
        512,
        3,
    ),
}
CPU = "1.3M on the CPU"
CASES[CPU] = (["--recipe", "qwen25_tiny"], 4, 4, 4, 60)


def list_commands(
    case: str, rounds: int, stock_too: bool, peers: list[str], fp8_too: bool = False
) -> list[tuple[str, list[str]]]:
    """("stock", "ours", "fp8" or the peer's variant, arguments after `python -m`) of one case, in order."""
    recipe, micro, stock_micro, total, steps = CASES[case]
    batch = [*recipe, f"data.global_batch_size={total}", "--steps", str(steps)]
    stock = [
        "bench.throughput",
        "--plain",
        "--env",
        "base" if case == CPU else "official",
        *batch,
        f"data.micro_batch_size={stock_micro}",
    ]
    ours = ["bench.throughput", *batch, f"data.micro_batch_size={micro}"]
    variants = [
        (name, ["bench.peer_hf", "--variant", name, *batch, f"data.micro_batch_size={micro}"]) for name in peers
    ]
    variants = variants[:1] if case == CPU else variants
    fp8 = [("fp8", [*ours, *_FP8])] if fp8_too and case != CPU else []
    return [("stock", stock)] * stock_too + [("ours", ours), *fp8, *variants] * rounds


def summarize_case(case: str, runs: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One row of the table from the runs of a case; "peer" is the fastest variant that did not fail."""
    by_name = {name: [result for other, result in runs if other == name] for name, _ in runs}
    speeds = {
        name: statistics.median(result["tokens_per_second"] for result in results)
        for name, results in by_name.items()
        if name in VARIANTS and not any("error" in result for result in results)
    }
    found: dict[str, Any] = {"case": case}
    fastest = max(speeds, key=lambda name: speeds[name], default=None)
    found |= {f"{name}_error": r["error"] for name, results in by_name.items() for r in results if "error" in r}
    for name, variant in (("stock", "stock"), ("ours", "ours"), ("fp8", "fp8"), ("peer", fastest)):
        results = by_name.get(variant or "", [])
        if not results or any("error" in result for result in results):
            continue
        found[f"{name}_tokens_per_second"] = statistics.median(r["tokens_per_second"] for r in results)
        found[f"{name}_p99_over_p50"] = max(r["step_p99"] / r["step_p50"] for r in results)
        if "device" in results[0]:  # a GPU
            found[f"{name}_peak_gib"] = max(r["peak_gib"] for r in results)
            found[f"{name}_mfu_of_card"] = statistics.median(r["mfu_of_card"] for r in results)
            found["device"] = results[0]["device"]
    if "ours_tokens_per_second" in found and "peer_tokens_per_second" in found:
        found["peer"], found["peers"] = fastest, speeds
        found["ratio"] = found["ours_tokens_per_second"] / found["peer_tokens_per_second"]
    return found


def format_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, and a line for each benchmark that failed."""
    lines = [
        "| case | stock | fastest peer | ours | with FP8 | ours / peer | GiB peer | GiB ours | p99 / p50"
        " | of the matmul rate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    failed = [f"{r['case']}, {name}: {value}" for r in rows for name, value in r.items() if name.endswith("_error")]
    for r in rows:
        if "ratio" not in r:
            lines.append(f"| {r['case']} | not measured |")
            continue
        gib = [f"{r[f'{name}_peak_gib']:.1f}" if f"{name}_peak_gib" in r else "" for name in ("peer", "ours")]
        rate = f"{r['ours_mfu_of_card']:.0%}" if "ours_mfu_of_card" in r else ""
        lines.append(
            f"| {r['case']} | {r.get('stock_tokens_per_second', 0):,.0f}"
            f" | {r['peer_tokens_per_second']:,.0f} ({r['peer']}) | {r['ours_tokens_per_second']:,.0f}"
            f" | {f'{fp8:,.0f}' if (fp8 := r.get('fp8_tokens_per_second')) else ''}"
            f" | {r['ratio']:.2f} | {gib[0]} | {gib[1]} | {r['ours_p99_over_p50']:.2f} | {rate} |"
        )
    return "\n".join([*lines, "", *failed] if failed else lines)


def main() -> None:
    """Measure the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all cases of the GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--skip-stock", action="store_true", help="only our recipe and the peers")
    parser.add_argument("--fp8", action="store_true", help="our recipe with FP8 products too")
    parser.add_argument("--peers", default=",".join(VARIANTS), help="variants of bench.peer_hf; default: %(default)s")
    parser.add_argument("--peer-path", help="PYTHONPATH of the peer's processes")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    rows, everything = [], {}
    cases = args.case or [name for name in CASES if name != CPU]
    peers = args.peers.split(",")
    if unknown := set(peers) - set(VARIANTS):
        parser.error(f"--peers: expected some of {', '.join(VARIANTS)}, found {', '.join(sorted(unknown))}")
    commands = [
        (case, *one) for case in cases for one in list_commands(case, args.rounds, not args.skip_stock, peers, args.fp8)
    ]
    paths = [args.peer_path if name in VARIANTS else None for _, name, _ in commands]
    at_once = 1 if CPU in cases else 6
    results = measure_in_turns([command for _, _, command in commands], sys.stderr, paths, at_once)
    for case in cases:
        runs = [(name, found) for (of, name, _), found in zip(commands, results, strict=True) if of == case]
        everything[case] = runs
        rows.append(summarize_case(case, runs))
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "runs": everything}, indent=1) + "\n")
    print(format_table(rows))


if __name__ == "__main__":
    main()
