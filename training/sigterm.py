"""Slurm sends SIGTERM to every process of a job at once; data workers and checkpoint writers must outlive it.

A blocked signal stays pending, and children inherit the mask: the rank looks at the end of a step, finishes, saves and
stops, with all its helpers alive. (A handler would not do: a data worker killed in mid-step fails the run before it
can save.) Nothing heavy is imported here: threads that start before `raise_` do not inherit the mask.
"""

from __future__ import annotations

import multiprocessing
import signal

_ASKS = {signal.SIGTERM}


def raise_() -> None:
    """From now on SIGTERM only waits to be seen. Before anything starts a thread or a process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS)


def asked() -> bool:
    """SIGTERM has come and waits."""
    return bool(_ASKS & signal.sigpending())


def end_children() -> None:
    """At exit Python ends daemons with SIGTERM, which they have blocked as well, and would wait for them for ever."""
    if _ASKS & signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        for child in multiprocessing.active_children():
            child.kill()
