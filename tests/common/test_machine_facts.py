"""Facts about this machine."""

from __future__ import annotations

import socket

import pytest

from common.errors import UserError
from common.machine_facts import find_free_port


def test_find_free_port_tries_several() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert find_free_port(tries=10, first=port) > port
        with pytest.raises(UserError, match="no free port"):
            find_free_port(tries=1, first=port)
