"""Keeps signals that ask a rank to stop away from its child processes until the rank has saved.

`timeout`, a closing terminal, a container's stop and Slurm send their signal to every process of a run at once. A data
worker that is killed in mid-step fails the run before it can save, so child processes ignore these signals
(common/processes.py) and end with their rank.

Slurm's SIGTERM can come while such a process is being started. A blocked signal stays pending, and child processes
inherit the mask: the rank looks for the signal at the end of each step, saves and stops, while all its child processes
live. Nothing heavy is imported here, because threads that start before `block` do not inherit the mask.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading

_SIGTERM = {signal.SIGTERM}
KILLED_WITHIN_S = 10.0  # a process that was killed is gone, unless the kernel waits for a device


def block() -> None:
    """Block SIGTERM in this process and all its later children. Call it before any thread or process starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGTERM)


def is_pending() -> bool:
    """Whether a blocked SIGTERM has arrived."""
    return bool(_SIGTERM & signal.sigpending())


def kill_children() -> None:
    """Kill all child processes that multiprocessing knows.

    At exit Python ends daemonic ones with SIGTERM, which they ignore, and would wait for them for ever.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises an error there for a data worker that was killed
    for child in multiprocessing.active_children():
        child.kill()
    for child in multiprocessing.active_children():
        child.join(KILLED_WITHIN_S)
        if child.is_alive():  # in the kernel, such as one that waits for a disk; at exit Python would wait for it
            multiprocessing.process._children.discard(child)  # type: ignore[attr-defined]
