"""Compare two models: architecture, every parameter, then the logits at every position of a real text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convert.hf import HFFolder
from convert.models import Model, open_model

# Mixes words, figures, code and Chinese, so that many rows of the embedding are compared.
TEXT = """Continual pretraining starts from weights that already know a language. In 2024, 18 trillion tokens
had been read before the first step; the learning rate was 3e-4 at its peak. 模型在新的语料上继续训练，而不忘记旧的。
def mean(values: list[float]) -> float:
    return sum(values) / len(values)
Does the copy say the same as the original? Only if every position agrees."""
TOLERANCE = 1e-4  # largest accepted absolute difference of logits computed in fp32 ...
RELATIVE = 1e-5  # ... or this share of the largest logit if that is more: summing 24 layers in another order costs it


@dataclass(frozen=True)
class Parameter:
    """One parameter of both models.

    Args:
        left: stored dtype in the first model.
        right: stored dtype in the second model.
        difference: largest absolute one, after both are rounded to the precision of the comparison.
    """

    name: str
    shape: tuple[int, ...]
    left: torch.dtype
    right: torch.dtype
    difference: float


@dataclass
class Verification:
    """The result of a comparison.

    Args:
        left: name of the first model.
        right: name of the second model.
        precision: dtype that both models were rounded to: bf16 if either stores bf16.
        tolerance: largest accepted absolute difference of logits.
        architecture: differences between the architectures.
        parameters: every parameter, in the order of the table in convert/tensor_map.py.
        positions: largest absolute logit difference at each position.
        agreeing: number of positions with the same most likely token.
    """

    left: str
    right: str
    precision: torch.dtype
    tolerance: float
    architecture: list[str] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)
    agreeing: int = 0

    @property
    def parameter_difference(self) -> float:
        """Largest absolute difference over all parameters."""
        return _largest([p.difference for p in self.parameters])

    @property
    def logit_difference(self) -> float:
        """Largest absolute difference of logits over all positions."""
        return _largest(self.positions)

    @property
    def ok(self) -> bool:
        """Same architecture, equal parameters, and logits within the tolerance at every position."""
        equal = bool(self.parameters) and self.parameter_difference == 0.0
        close = bool(self.positions) and self.logit_difference <= self.tolerance
        return not self.architecture and equal and close


def _largest(values: list[float]) -> float:
    """The largest value, with NaN counted as infinite; 0 without values."""
    return max((value if value == value else float("inf") for value in values), default=0.0)


def verify(
    left: Path | str, right: Path | str, *, tolerance: float = TOLERANCE, num_tokens: int = 128, show: bool = True
) -> Verification:
    """Compare two models on the CPU; each is anything that `open_model` opens.

    Where one model stores bf16 and the other fp32, both are rounded to bf16 first: a copy is then equal to the
    last bit, and its logits (always computed in fp32) are held to the same tolerance.

    Args:
        tolerance: accepted absolute difference of logits at each position; at least `RELATIVE` of the largest logit.
        num_tokens: number of tokens to compare at most.
        show: print the table of parameters and the verdict.

    Raises:
        UserError: one model cannot be opened. A difference is not an error: see `Verification.ok`.
    """
    one, two = open_model(left), open_model(right)
    precision = torch.bfloat16 if torch.bfloat16 in (one.dtype, two.dtype) else torch.float32
    result = Verification(str(left), str(right), precision, tolerance, one.arch.differences(two.arch))
    if not result.architecture:
        result.parameters = list(_compare_parameters(one, two, precision))
        _compare_logits(result, one, two, _tokenize_text(one, two)[:num_tokens])
    if show:
        print_table(result)
    return result


def _compare_parameters(one: Model, two: Model, precision: torch.dtype) -> Iterator[Parameter]:
    for (name, a), (_, b) in zip(one.tensors(), two.tensors(), strict=True):
        difference = (a.to(precision).float() - b.to(precision).float()).abs().max().item()
        yield Parameter(name, tuple(a.shape), a.dtype, b.dtype, difference)


def _compare_logits(result: Verification, one: Model, two: Model, ids: torch.Tensor) -> None:
    from convert.logits import compute_logits

    a, b = compute_logits(one, ids, result.precision), compute_logits(two, ids, result.precision)
    result.tolerance = max(result.tolerance, RELATIVE * a.abs().max().item())
    result.positions = (a - b).abs().amax(dim=-1).tolist()
    result.agreeing = int((a.argmax(-1) == b.argmax(-1)).sum())


def _tokenize_text(*models: Model) -> torch.Tensor:
    """int64[seq]: `TEXT` through the tokenizer of the first model that has one."""
    from data.tokenizer import load_tokenizer

    folders = [model.path if isinstance(model, HFFolder) else model.tokenizer for model in models]
    folder = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), folders[0])
    ids = torch.tensor(load_tokenizer(folder.resolve())(TEXT)["input_ids"])
    return ids[ids < models[0].arch.vocab_size]


def print_table(result: Verification) -> None:
    """Print one line per kind of parameter (all layers together), then the logits and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table("parameter", "shape", "left", "right", "largest difference", title=f"{result.left} | {result.right}")
    for name, group in _by_kind(result).items():
        largest = _largest([p.difference for p in group])
        dtypes = [str(d).removeprefix("torch.") for d in (group[0].left, group[0].right)]
        table.add_row(name, " x ".join(map(str, group[0].shape)), *dtypes, f"{largest:.3g}")
    console = Console()
    console.print(table)
    for line in summarize(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summarize(result: Verification) -> list[str]:
    """The outcome in a few lines of text."""
    if result.architecture:
        return [f"architecture differs (left, right): {'; '.join(result.architecture)}", "verdict: NOT the same model"]
    precision = str(result.precision).removeprefix("torch.")
    worst = max(range(len(result.positions)), key=result.positions.__getitem__, default=0)
    return [
        f"parameters: {len(result.parameters)}, compared as {precision}, "
        f"largest difference {result.parameter_difference:g}",
        f"logits in fp32 at {len(result.positions)} positions: largest difference {result.logit_difference:.3g} "
        f"(position {worst}), tolerance {result.tolerance:g}; "
        f"same most likely token at {result.agreeing} of {len(result.positions)}",
        f"verdict: {'the same model' if result.ok else 'NOT the same model'}",
    ]


def _by_kind(result: Verification) -> dict[str, list[Parameter]]:
    groups: dict[str, list[Parameter]] = {}
    for p in result.parameters:
        kind = ".".join("*" if part.isdigit() else part for part in p.name.split("."))
        groups.setdefault(kind, []).append(p)
    return groups
