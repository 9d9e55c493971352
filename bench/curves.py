"""Compare the losses of training with and without the speed levers: same recipe, same seed, same data.

bf16 training amplifies rounding: two runs that differ only in the order of sums drift apart. How far is measured too,
as the plain path beside itself with another micro batch (the same mathematics, summed in another order).

    python -m bench.curves --recipe qwen25_500m_single --steps 200 --output docs/figures/fast-and-plain.svg

Prints one JSON object: the mean and largest difference (nats per token) of fast and plain, and of plain and plain.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bench.throughput import base_parser
from bench.turns import measure_in_turns


def main() -> None:
    """Train both ways, compare, draw."""
    parser = base_parser(__doc__ or "")
    parser.add_argument("--output", type=Path, required=True, help="the figure: .svg or .png")
    args = parser.parse_intermixed_args()
    run = ["bench.throughput", "--recipe", args.recipe, "--warmup", "8", "--steps", str(args.steps), "--losses"]
    overrides = args.overrides
    commands = [
        [*run, "--plain", *overrides],
        [*run, *overrides],
        [*run, "--plain", *overrides, "data.micro_batch_size=1"],
    ]
    results = measure_in_turns(commands, sys.stderr)
    for result in results:
        if "error" in result:
            sys.exit(result["error"])
    plain, fast, other = (result["losses"] for result in results)
    draw_losses(plain, fast, other, args.output)
    print(json.dumps({"fast_and_plain": compare_losses(plain, fast), "plain_and_plain": compare_losses(plain, other)}))


def compare_losses(one: list[float], other: list[float]) -> dict[str, float]:
    """Mean and largest difference, over the first 50 steps and over all."""
    gaps = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {
        "mean_50": sum(gaps[:50]) / len(gaps[:50]),
        "largest_50": max(gaps[:50]),
        "mean": sum(gaps) / len(gaps),
        "largest": max(gaps),
        "steps": len(gaps),
    }


def draw_losses(plain: list[float], fast: list[float], other: list[float], path: Path) -> None:
    """Draw the curves, and below them their differences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, height_ratios=[3, 2], figsize=(7, 5))
    steps = range(1, len(plain) + 1)
    above.plot(steps, plain, label="plain", linewidth=2.5, color="#bbbbbb")
    above.plot(steps, fast, label="fast", linewidth=1, color="#1f5fa8")
    above.set_ylabel("loss, nats per token")
    above.legend(frameon=False)
    for name, curve, color in (("fast - plain", fast, "#1f5fa8"), ("plain, micro batch 1 - plain", other, "#a8481f")):
        below.semilogy(
            steps, [max(abs(a - b), 1e-6) for a, b in zip(curve, plain, strict=True)], label=name, lw=1, color=color
        )
    below.legend(frameon=False)
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
