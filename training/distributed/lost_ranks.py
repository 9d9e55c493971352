"""When a rank is lost: end within the time that was set, and say which rank and host it was.

Each rank listens on a port of its own from the start. When a collective fails, or no step ends for most of the
timeout, the others are asked one by one: a host that cut the link, a process that died and a process that is stuck
answer differently. Without this torch names nobody ("Timed out waiting for recv operation to complete"), and NCCL's
watchdog ends the process from C++.
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

from common.environment.merge import collective_timeout_s
from common.environment.sets import TIMEOUT_KEY
from common.errors import EXIT_RUN, ProjectError

log = logging.getLogger("launch")

_ANSWER_S = 3.0  # a peer that needs longer for one byte is not well
_FAILURE = re.compile(
    r"Timed out waiting|Connection closed by peer|Connection reset by peer|Broken pipe|No route to host"
    r"|Connect timeout|Connection refused|NCCL error|ncclRemoteError|Watchdog|wait timeout|Socket Timeout|Gloo"
)


class LostPeerError(ProjectError):
    """A rank went away while others waited for it (exit code 1)."""


@dataclass(frozen=True)
class Peer:
    """Where a rank can be asked whether it lives."""

    rank: int
    host: str
    address: str
    port: int

    def ask(self) -> str:
        """What is wrong with it; nothing if it lives."""
        try:
            wire = socket.create_connection((self.address, self.port), timeout=_ANSWER_S)
        except ConnectionRefusedError:
            return "its process is gone"
        except OSError as problem:
            return f"its host does not answer ({problem.strerror or problem})"
        with wire, contextlib.suppress(OSError):  # the kernel takes the call, the process says its number
            if wire.recv(16) == str(self.rank).encode():
                return ""
        return "its process is stuck or ending"

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address})"


class Presence:
    """This rank's open port, and the other ranks'."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.others: list[Peer] = []
        self.last_step = time.monotonic()
        self._door = socket.create_server(("", 0), backlog=128)
        threading.Thread(target=self._serve, name="presence", daemon=True).start()

    def here(self) -> Peer:
        return Peer(self.rank, socket.gethostname(), _own_address(), self._door.getsockname()[1])

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                wire, _ = self._door.accept()
                with wire:
                    wire.sendall(str(self.rank).encode())

    def know(self, others: Sequence[Peer]) -> None:
        """Remember those that can be asked; behind a firewall silence would mean nothing."""
        closed = {peer for peer, problem in _ask_all(others) if problem}
        self.others = [peer for peer in others if peer not in closed]
        if closed:
            log.warning(
                "peers: %s cannot be asked from here; if lost, it will not be named", ", ".join(map(str, closed))
            )

    def lost(self) -> list[str]:
        """One line for each rank that does not answer."""
        return [f"{peer}: {problem}" for peer, problem in _ask_all(self.others) if problem]


def _own_address() -> str:
    """The address that leads to the other ranks: the one from which MASTER_ADDR is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))))
        return str(probe.getsockname()[0])


def _ask_all(peers: Sequence[Peer]) -> list[tuple[Peer, str]]:
    if not peers:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(64, len(peers))) as pool:
        return list(zip(peers, pool.map(Peer.ask, peers), strict=True))


_presence: Presence | None = None
_tell: Callable[[str], None] | None = None


def limit_waiting() -> int:
    """Give every process group, and those still to be made, the timeout of the environment; in seconds.

    NeMo 2.3 makes the world's group with torch's default and Megatron's with 30 minutes, and takes neither from the
    recipe. To be called before the groups are made and again after.
    """
    seconds = collective_timeout_s(os.environ)
    limit = timedelta(seconds=seconds)
    c10d.default_pg_timeout = limit
    c10d.default_pg_nccl_timeout = limit
    for group in list(c10d._world.pg_map):
        if isinstance(group, c10d.ProcessGroup):
            c10d._set_pg_timeout(limit, group)
    return seconds


def open_door(rank: int) -> Peer:
    """Listen; returns what the other ranks must know."""
    global _presence
    _presence = Presence(rank)
    return _presence.here()


def meet(everyone: Sequence[Peer]) -> None:
    """Know the other ranks, and watch for the time when no step ends."""
    assert _presence is not None
    _presence.know([peer for peer in everyone if peer.rank != _presence.rank])
    threading.Thread(target=_watch, args=(_presence,), name="peer-watch", daemon=True).start()


def step_ended() -> None:
    """This rank goes on: a step, or a batch of a validation, is over."""
    if _presence is not None:
        _presence.last_step = time.monotonic()


def _watch(presence: Presence) -> None:
    """Shortly before collectives time out, name who is lost. Under NCCL nobody else could: end this rank here."""
    patience = 0.9 * collective_timeout_s(os.environ)
    while True:
        time.sleep(min(1.0, patience / 10))
        if time.monotonic() - presence.last_step < patience:
            continue
        if lost := presence.lost():
            text = _error(lost, f"no step ended for {patience:.0f} s").explain()
            log.error("%s", text)
            if dist.get_backend() == "nccl":
                if _tell is not None:
                    _tell(text)
                os._exit(EXIT_RUN)
            return
        presence.last_step = time.monotonic()


@contextlib.contextmanager
def explained(tell: Callable[[str], None]) -> Iterator[None]:
    """Turn a failed collective into an error that names the lost rank.

    Args:
        tell: keeps this rank's last word where its launcher finds it, for the case that no exception can.

    Raises:
        LostPeerError: instead of torch's error, which is its cause.
    """
    global _tell
    _tell = tell
    try:
        yield
    except (RuntimeError, OSError) as problem:
        if _presence is None or not _is_failed_collective(problem):
            raise
        raise _error(_presence.lost(), _first_line(problem)) from problem


def _is_failed_collective(problem: BaseException) -> bool:
    return isinstance(problem, dist.DistError) or bool(_FAILURE.search(str(problem)))


def _first_line(problem: BaseException) -> str:
    """torch's words without its C++ call stack and advice."""
    text = " ".join(re.split(r"Exception raised from|This is typically", str(problem))[0].split())
    return re.sub(r"\[[^\]]*/(\w+\.(?:cc|cpp|h):\d+)\]", r"[\1]", text)[:300]


def _error(lost: Sequence[str], words: str) -> LostPeerError:
    seconds = collective_timeout_s(os.environ)
    if lost:
        return LostPeerError(
            "lost " + "; ".join(lost),
            expected=f"an answer of every rank within {seconds} s ({TIMEOUT_KEY})",
            found=words,
            do="look at that host (its log, its network, its memory); then --resume goes on from the last checkpoint",
        )
    return LostPeerError(
        "a collective failed, though every rank still answers",
        expected=f"all ranks in the same collective within {seconds} s ({TIMEOUT_KEY})",
        found=words,
        do=f"the ranks' logs: one may be slow or elsewhere in its work; {TIMEOUT_KEY} sets the patience",
    )
