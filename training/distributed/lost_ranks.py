"""Ends a run within the collective timeout when a rank is lost, and names that rank and its host.

Each rank listens on a port of its own from the start. When a collective fails, or no step ends for most of the
timeout, a rank asks the others one by one. A host whose link is cut, a process that is dead and a process that is
stuck answer differently. Without this, torch names no rank ("Timed out waiting for recv operation to complete"), and
NCCL's watchdog ends the process from C++.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from common.commands import resume_command
from common.environment.merge import collective_timeout_s
from common.environment.sets import TIMEOUT_KEY
from common.errors import EXIT_RUN, ProjectError
from common.machine_facts import MASTER_PORT

log = logging.getLogger("launch")

_REPLY_TIMEOUT_S = 3.0  # a live process needs far less for one number
_COLLECTIVE_FAILURE = re.compile(
    r"Timed out waiting|Connection closed by peer|Connection reset by peer|Broken pipe|No route to host"
    r"|Connect timeout|Connection refused|NCCL error|ncclRemoteError|Watchdog|wait timeout|Socket Timeout|Gloo"
)


class LostRankError(ProjectError):
    """A collective failed because another rank ended or does not answer (exit code 1)."""


@dataclass(frozen=True)
class Peer:
    """The address on which a rank answers whether it is alive."""

    rank: int
    host: str
    address: str
    port: int

    def problem(self) -> str:
        """Ask the rank for its number. Returns what is wrong with it, or an empty string if it is alive."""
        try:
            connection = socket.create_connection((self.address, self.port), timeout=_REPLY_TIMEOUT_S)
        except ConnectionRefusedError:
            return "its process is gone"
        except OSError as error:
            return f"its host does not answer ({error.strerror or error})"
        with connection, contextlib.suppress(OSError):  # the kernel accepts; only a live process sends its number
            if connection.recv(16) == str(self.rank).encode():
                return ""
        return "its process is stuck or ending"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address})"


class LivenessServer:
    """This rank's open port, and the other ranks' addresses.

    Args:
        rank: the number that is sent to every rank that connects.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.peers: list[Peer] = []
        self.last_step = time.monotonic()
        self._socket = socket.create_server(("", 0), backlog=128)
        threading.Thread(target=self._serve, name="liveness-server", daemon=True).start()

    def own_peer(self) -> Peer:
        """This rank as the others reach it."""
        return Peer(self.rank, socket.gethostname(), _own_address(), self._socket.getsockname()[1])

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = self._socket.accept()
                with connection:
                    connection.sendall(str(self.rank).encode())

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Remember the ranks that answer now. From a rank behind a firewall, later silence would mean nothing."""
        unreachable = {peer for peer, problem in _ask_all(peers) if problem}
        self.peers = [peer for peer in peers if peer not in unreachable]
        if unreachable:
            log.warning(
                "lost ranks: %s cannot be reached from this rank; if lost, it will not be named",
                ", ".join(map(str, unreachable)),
            )

    def find_lost(self) -> list[str]:
        """Ask all other ranks. Returns one line for each that is not alive."""
        return [f"{peer}: {problem}" for peer, problem in _ask_all(self.peers) if problem]


def _own_address() -> str:
    """This machine's address towards the other ranks: the one from which MASTER_ADDR is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", MASTER_PORT))))
        return str(probe.getsockname()[0])


def _ask_all(peers: Sequence[Peer]) -> list[tuple[Peer, str]]:
    if not peers:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(64, len(peers))) as pool:
        return list(zip(peers, pool.map(Peer.problem, peers), strict=True))


_server: LivenessServer | None = None
_record_error: Callable[[str], None] | None = None


def set_collective_timeout() -> int:
    """Give every process group, and those still to be made, the timeout that the environment sets.

    NeMo 2.3 makes the world's group with torch's default and Megatron's groups with 30 minutes, and takes neither from
    the recipe. Call it before the groups are made and again afterwards.

    Returns:
        the timeout in seconds.
    """
    seconds = collective_timeout_s(os.environ)
    limit = timedelta(seconds=seconds)
    c10d.default_pg_timeout = limit
    c10d.default_pg_nccl_timeout = limit
    for group in list(c10d._world.pg_map):
        if isinstance(group, c10d.ProcessGroup):
            c10d._set_pg_timeout(limit, group)
    return seconds


def start_server(rank: int) -> Peer:
    """Start to answer the other ranks. Returns the address that they need."""
    global _server
    _server = LivenessServer(rank)
    return _server.own_peer()


def watch_peers(peers: Sequence[Peer]) -> None:
    """Remember the other ranks (`peers` includes this one), and start to watch for the time in which no step ends."""
    assert _server is not None
    _server.set_peers([peer for peer in peers if peer.rank != _server.rank])
    threading.Thread(target=_watch, args=(_server,), name="lost-ranks-watch", daemon=True).start()


def record_step() -> None:
    """Note that this rank makes progress: a training step has ended."""
    if _server is not None:
        _server.last_step = time.monotonic()


def _watch(server: LivenessServer) -> None:
    """Name the lost ranks shortly before collectives time out. With NCCL also end this rank: no exception would."""
    limit_s = 0.9 * collective_timeout_s(os.environ)
    while True:
        time.sleep(min(1.0, limit_s / 10))
        if time.monotonic() - server.last_step < limit_s:
            continue
        if lost := server.find_lost():
            text = _collective_error(lost, f"no step ended for {limit_s:.0f} s").explain()
            log.error("%s", text)
            if dist.get_backend() == "nccl":
                if _record_error is not None:
                    _record_error(text)
                os._exit(EXIT_RUN)
            return
        server.last_step = time.monotonic()


@contextlib.contextmanager
def explain_failed_collectives(record_error: Callable[[str], None]) -> Iterator[None]:
    """Turn the error of a failed collective into one that names the lost rank.

    Args:
        record_error: writes an error text to this rank's state file. It is called where the process ends without an
            exception.

    Raises:
        LostRankError: instead of torch's error, which is its cause.
    """
    global _record_error
    _record_error = record_error
    try:
        yield
    except (RuntimeError, OSError) as error:
        if _server is None or not _is_failed_collective(error):
            raise
        raise _collective_error(_server.find_lost(), _first_line(error)) from error


def _is_failed_collective(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or bool(_COLLECTIVE_FAILURE.search(str(error)))


def _first_line(error: BaseException) -> str:
    """torch's message without its C++ call stack and advice."""
    text = " ".join(re.split(r"Exception raised from|This is typically", str(error))[0].split())
    return re.sub(r"\[[^\]]*/(\w+\.(?:cc|cpp|h):\d+)\]", r"[\1]", text)[:300]


def _collective_error(lost: Sequence[str], message: str) -> LostRankError:
    seconds = collective_timeout_s(os.environ)
    if lost:
        return LostRankError(
            "lost " + "; ".join(lost),
            expected=f"an answer from every rank within {seconds} s ({TIMEOUT_KEY})",
            found=message,
            do=f"look at that host (its log, its network, its memory), then continue: {resume_command()}",
        )
    return LostRankError(
        "a collective failed, though every rank still answers",
        expected=f"all ranks in the same collective within {seconds} s ({TIMEOUT_KEY})",
        found=message,
        do=f"compare the ranks' logs: one rank may be slow or in another collective; {TIMEOUT_KEY} sets the timeout",
    )
