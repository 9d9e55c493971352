"""The figures that a plan scales from are those of the docs' pages, and scale as the pages say."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from planning import figures
from recipes import registry

ROOT = Path(__file__).resolve().parents[2]
CONSTANTS = [
    (figures.load()["data_parallel_efficiency"], "1.98"),
    (figures.load()["start_seconds"]["cpu"], "10"),
    (figures.load()["start_seconds"]["gpu"], "21.5"),
    (figures.load()["checkpoint_bytes_per_second"], "14 s"),
]


def _lines(page: str, row: str) -> str:
    """The paragraphs or table rows of a page that contain `row`, each as one line."""
    blocks = re.split(r"\n\n|\n(?=\|)", (ROOT / figures.PAGES / page).read_text())
    return " ".join(" ".join(block.split()) for block in blocks if row in " ".join(block.split()))


@pytest.mark.parametrize("row", figures.load()["throughput"], ids=lambda row: str(row["tokens_per_second"]))
def test_each_rate_stands_on_its_page(row: dict[str, Any]) -> None:
    assert f"{row['tokens_per_second']:,}" in _lines(row["page"], row["row"])


@pytest.mark.parametrize(("row", "text"), CONSTANTS)
def test_each_constant_stands_on_its_page(row: dict[str, Any], text: str) -> None:
    assert text in _lines(row["page"], row["row"])
    assert figures.load()["data_parallel_efficiency"]["value"] == 1.98 / 2


def test_operations_per_token() -> None:
    """The floors of docs/measurements/speed-levers.md: 1.323 GFLOP per token at 318M."""
    shape = dataclasses.replace(registry.resolve("qwen25_500m_single").plan.shape, num_query_groups=12)
    assert figures.flops_per_token(shape, 2048) == pytest.approx(1.323e9, rel=1e-3)
    assert figures.flops_per_token(registry.resolve("qwen25_500m").plan.shape, 2048) == pytest.approx(3.228e9, rel=1e-3)


def test_cards_are_found_by_any_of_their_names() -> None:
    assert figures.find_card("h100").memory_gib == 79.6
    assert figures.find_card("NVIDIA A100").name == "A100 80GB"
    with pytest.raises(UserError, match="unknown GPU") as error:
        figures.find_card("H1000")
    assert 'did you mean --gpu "H100"?' in error.value.do
    assert figures.recognise_card("NVIDIA H100 80GB HBM3", 79.65).bf16_tflops == 989
    assert figures.recognise_card("NVIDIA H100 PCIe", 79.65).bf16_tflops == 756
    assert figures.recognise_card("NVIDIA A100-SXM4-40GB", 39.5).power_w == 400
    assert figures.recognise_card("NVIDIA L40S", 44.4).bf16_tflops == 362
    assert figures.recognise_card("NVIDIA Unheard-of", 12.0).bf16_tflops is None


def test_the_nearest_rate_has_the_same_layout_and_size() -> None:
    single, multi = registry.resolve("qwen25_500m_single").plan, registry.resolve("qwen25_500m_multinode").plan
    found = figures.nearest_rate(dataclasses.replace(single, micro_batch_size=4), "fast", figures.find_card("H100"))
    assert found.tokens_per_second == 274318
    assert figures.nearest_rate(multi, "fast", None).plan.tensor_parallel == 2
    full = registry.resolve("qwen25_500m").plan
    assert figures.nearest_rate(full, "fast", figures.find_card("H200")).tokens_per_second == 145253
    assert figures.nearest_rate(full, "plain", figures.find_card("A100")).tokens_per_second == 81170
