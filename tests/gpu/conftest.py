"""Tests on a GPU start real processes: a fork of a process that has loaded Transformer Engine cannot use CUDA."""

from __future__ import annotations

import pytest

from tests import fork_server


@pytest.fixture(autouse=True)
def _real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fork_server.VARIABLE, raising=False)
