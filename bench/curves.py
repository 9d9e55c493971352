"""The loss of the fast path over the plain path's: same recipe, same seed, same data.

    python -m bench.curves --recipe qwen25_500m_single --steps 200 --output docs/figures/fast-and-plain.svg

Prints one JSON object: the largest and the mean difference of the losses (nats a token), and both paths' speed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.throughput import arguments
from bench.turns import measure


def main() -> None:
    """Train both ways, compare, draw."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--output", type=Path, required=True, help="the figure: .svg or .png")
    args = parser.parse_intermixed_args()
    run = ["bench.throughput", "--recipe", args.recipe, "--warmup", "8", "--steps", str(args.steps), "--losses"]
    plain, fast = measure([[*run, "--plain", *args.overrides], [*run, *args.overrides]], sys.stderr)
    for result in (plain, fast):
        if "error" in result:
            sys.exit(result["error"])
    gaps = [abs(a - b) for a, b in zip(plain["losses"], fast["losses"], strict=True)]
    draw(plain["losses"], fast["losses"], gaps, args.output)
    found: dict[str, Any] = {"steps": len(gaps), "largest_gap": max(gaps), "mean_gap": sum(gaps) / len(gaps)}
    found |= {
        "plain_tokens_per_second": plain["tokens_per_second"],
        "fast_tokens_per_second": fast["tokens_per_second"],
    }
    print(json.dumps(found))


def draw(plain: list[float], fast: list[float], gaps: list[float], path: Path) -> None:
    """Both curves, and what is between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, height_ratios=[3, 1], figsize=(7, 4.5))
    steps = range(1, len(plain) + 1)
    above.plot(steps, plain, label="plain", linewidth=2.5, color="#bbbbbb")
    above.plot(steps, fast, label="fast", linewidth=1, color="#1f5fa8")
    above.set_ylabel("loss, nats a token")
    above.legend(frameon=False)
    below.semilogy(steps, [max(gap, 1e-7) for gap in gaps], linewidth=1, color="#a8481f")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    main()
