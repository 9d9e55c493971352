"""Tests on a GPU start real processes: a fork of a process that has loaded Transformer Engine cannot use CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import fork_server


@pytest.fixture(scope="session", autouse=True)
def _real_processes() -> Iterator[None]:
    """For the whole session, because fixtures of a module start runs too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(fork_server.VARIABLE, raising=False)
        yield
