"""Keeps Slurm's SIGTERM away from data workers and checkpoint writers until the rank has saved.

Slurm sends SIGTERM to every process of a job at once. A blocked signal stays pending, and child processes inherit the
mask: the rank looks for the signal at the end of each step, saves and stops, while all its child processes live.
A handler would not do: a data worker that is killed in mid-step fails the run before it can save. Nothing heavy is
imported here, because threads that start before `block` do not inherit the mask.
"""

from __future__ import annotations

import multiprocessing
import signal

_SIGTERM = {signal.SIGTERM}


def block() -> None:
    """Block SIGTERM in this process and all its later children. Call it before any thread or process starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)


def is_pending() -> bool:
    """Whether a blocked SIGTERM has arrived."""
    return bool(_SIGTERM & signal.sigpending())


def kill_children() -> None:
    """Kill daemonic child processes if SIGTERM is blocked.

    At exit Python ends them with SIGTERM, which they have blocked as well, and would wait for them for ever.
    """
    if _SIGTERM & signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        for child in multiprocessing.active_children():
            child.kill()
