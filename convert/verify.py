"""Are two models the same? Parameter by parameter, then logits position by position on real tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convert.hf import HFFolder, resolve
from convert.nemo import NeMoCheckpoint, is_checkpoint

# Any text does; this one mixes words, figures, code and Chinese so that many rows of the embedding are read.
TEXT = """Continual pretraining starts from weights that already know a language. In 2024, 18 trillion tokens
had been read before the first step; the learning rate was 3e-4 at its peak. 模型在新的语料上继续训练，而不忘记旧的。
def mean(values: list[float]) -> float:
    return sum(values) / len(values)
Does the copy say the same as the original? Only if every position agrees."""
TOLERANCE = 1e-4  # max abs difference of logits computed in fp32 ...
RELATIVE = 1e-5  # ... or this share of the largest logit, if more: two orders of summing 24 layers differ by that


@dataclass(frozen=True)
class Parameter:
    """One parameter of the pair; `difference` is the max abs one, after both are rounded to the precision."""

    name: str
    shape: tuple[int, ...]
    left: torch.dtype
    right: torch.dtype
    difference: float


@dataclass
class Verification:
    """The outcome. `precision` is what both sides were rounded to: bf16 if either side stores bf16."""

    left: str
    right: str
    precision: torch.dtype
    tolerance: float
    architecture: list[str] = field(default_factory=list)  # differences
    parameters: list[Parameter] = field(default_factory=list)
    positions: list[float] = field(default_factory=list)  # max abs logit difference at each
    agreeing: int = 0  # positions with the same most likely token

    @property
    def parameter_difference(self) -> float:
        return _worst([p.difference for p in self.parameters])

    @property
    def logit_difference(self) -> float:
        return _worst(self.positions)

    @property
    def ok(self) -> bool:
        """Same architecture, equal parameters, logits within the tolerance at every position."""
        equal = bool(self.parameters) and self.parameter_difference == 0.0
        return not self.architecture and equal and bool(self.positions) and self.logit_difference <= self.tolerance


def _worst(values: list[float]) -> float:
    """The largest, with NaN counted as infinite."""
    return max((value if value == value else float("inf") for value in values), default=0.0)


def open_model(name: Path | str) -> HFFolder | NeMoCheckpoint:
    """A NeMo checkpoint folder, an HF folder, or a hub id."""
    path = Path(name).expanduser()
    return NeMoCheckpoint(path) if is_checkpoint(path) else HFFolder(resolve(str(name)))


def verify(
    left: Path | str, right: Path | str, *, tolerance: float = TOLERANCE, num_tokens: int = 128, show: bool = True
) -> Verification:
    """Compare two models, each an HF folder, a hub id or a NeMo checkpoint, on the CPU.

    Where one side stores bf16 and the other fp32, both are rounded to bf16 first: a copy is then equal to the
    last bit, and its logits (always computed in fp32) hold the same tolerance.

    Args:
        tolerance: max abs difference of logits, per position; at least `RELATIVE` of the largest logit.
        num_tokens: tokens to compare on, at most.
        show: print the table.

    Raises:
        UserError: one side cannot be opened. A difference is not an error: see `Verification.ok`.
    """
    one, two = open_model(left), open_model(right)
    precision = torch.bfloat16 if torch.bfloat16 in (one.dtype, two.dtype) else torch.float32
    result = Verification(str(left), str(right), precision, tolerance, one.arch.differences(two.arch))
    if not result.architecture:
        result.parameters = list(_compare(one, two, precision))
        _compare_logits(result, one, two, _real_tokens(one, two)[:num_tokens])
    if show:
        print_table(result)
    return result


def _compare(one: HFFolder | NeMoCheckpoint, two: HFFolder | NeMoCheckpoint, to: torch.dtype) -> Iterator[Parameter]:
    for (name, a), (_, b) in zip(one.tensors(), two.tensors(), strict=True):
        worst = (a.to(to).float() - b.to(to).float()).abs().max().item()
        yield Parameter(name, tuple(a.shape), a.dtype, b.dtype, worst)


def _compare_logits(
    result: Verification, one: HFFolder | NeMoCheckpoint, two: HFFolder | NeMoCheckpoint, ids: torch.Tensor
) -> None:
    from convert.logits import logits

    a, b = logits(one, ids, result.precision), logits(two, ids, result.precision)
    result.tolerance = max(result.tolerance, RELATIVE * a.abs().max().item())
    result.positions = (a - b).abs().amax(dim=-1).tolist()
    result.agreeing = int((a.argmax(-1) == b.argmax(-1)).sum())


def _real_tokens(*models: HFFolder | NeMoCheckpoint) -> torch.Tensor:
    """int64[seq]: `TEXT` through the tokenizer of the first model that has one."""
    from data.tokenizer import load_tokenizer

    folders = [model.path if isinstance(model, HFFolder) else model.tokenizer for model in models]
    folder = next((folder for folder in folders if (folder / "tokenizer.json").is_file()), folders[0])
    ids = torch.tensor(load_tokenizer(folder.resolve())(TEXT)["input_ids"])
    return ids[ids < models[0].arch.vocab_size]


def print_table(result: Verification) -> None:
    """One line a kind of parameter (all layers together), then the logits and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table("parameter", "shape", "left", "right", "max abs difference", title=f"{result.left} | {result.right}")
    for name, group in _by_kind(result).items():
        worst = _worst([p.difference for p in group])
        dtypes = [str(d).removeprefix("torch.") for d in (group[0].left, group[0].right)]
        table.add_row(name, " x ".join(map(str, group[0].shape)), *dtypes, f"{worst:.3g}")
    console = Console()
    console.print(table)
    for line in summary(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(result: Verification) -> list[str]:
    """The outcome in a few lines of text."""
    if result.architecture:
        return [f"architecture differs (left, right): {'; '.join(result.architecture)}", "verdict: NOT the same model"]
    both = str(result.precision).removeprefix("torch.")
    worst = max(range(len(result.positions)), key=result.positions.__getitem__, default=0)
    return [
        f"parameters: {len(result.parameters)}, compared as {both}, max abs difference {result.parameter_difference:g}",
        f"logits in fp32 at {len(result.positions)} positions: max abs difference {result.logit_difference:.3g} "
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
