"""A test's fork computes with threads of its own, also after its process has computed something large."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import call_in_fork

pytestmark = pytest.mark.nemo


def _compute() -> tuple[float, int]:
    x = torch.ones(2000, 2000)
    return float((x @ x).sum()), torch.get_num_threads()


def test_a_fork_does_not_wait_for_threads_that_it_does_not_have(tmp_path: Path) -> None:
    _compute()
    total, threads = call_in_fork(_compute, cwd=tmp_path)
    assert total == 2000**3 and threads >= torch.get_num_threads() == 1
