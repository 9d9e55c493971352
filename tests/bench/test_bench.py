"""The numbers that the benchmarks are based on."""

from __future__ import annotations

import dataclasses
from typing import Any

from bench.compare import format_table, summarize_case
from bench.flops import flops_per_token
from recipes.qwen25 import QWEN25_500M, REDUCED


def test_flops_of_a_token_counted_by_hand() -> None:
    """6 x (every weight of a matrix product + half of each attention product), 2048 tokens.

    12 groups, untied: 12 x 7,077,888 in the layers, 151,936 x 768 in the output layer, 12 x 2048 x 768 in attention.
    """
    twelve_groups = dataclasses.replace(REDUCED, num_query_groups=12)
    assert (
        flops_per_token(twelve_groups, 2048) == 6 * (12 * 7_077_888 + 151_936 * 768 + 12 * 2048 * 768) == 1_322_975_232
    )
    assert flops_per_token(QWEN25_500M, 2048) == 6 * (24 * 14_909_440 + 151_936 * 896 + 24 * 2048 * 896)


def test_a_failed_measurement_is_shown_and_not_averaged() -> None:
    good: dict[str, Any] = {
        "tokens_per_second": 2.0,
        "peak_gib": 1.0,
        "step_p50": 1.0,
        "step_p99": 1.1,
        "mfu_of_card": 0.5,
        "device": "x",
    }
    runs: list[tuple[str, dict[str, Any]]] = [
        ("stock", {"error": "exit code 1"}),
        ("ours", good),
        ("fp8", {**good, "tokens_per_second": 3.0}),
        ("compile", {**good, "tokens_per_second": 0.5}),
        ("reduce-overhead", {**good, "tokens_per_second": 1.0}),
        ("liger", {**good, "tokens_per_second": 9.0}),
        ("liger", {"error": "exit code 2"}),
    ]
    found = summarize_case("case", runs)
    assert found["ratio"] == 2.0 and found["stock_error"] == "exit code 1"
    assert found["peer"] == "reduce-overhead", "the fastest whose every round ran"
    broken = summarize_case("case", [("stock", good), ("ours", {"error": "exit code 137"}), ("compile", good)])
    table = format_table([found, broken])
    assert "ratio" not in broken and "ours_error: exit code 137" in table and "liger_error: exit code 2" in table
    assert "1 (reduce-overhead) | 2 | 3 | 2.00 |" in table
