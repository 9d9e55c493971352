"""A process that has NeMo imported and is forked for every Python process of a test that would import it again.

Run as `python tests/fork_server/server.py SOCKET`; it ends when its standard input does. site/sitecustomize.py is the
other side: a Python process that starts with CPT_FORK_SERVER=SOCKET in its environment sends its command line,
environment, folder, open files and namespaces here, and then only passes signals on and ends as the fork ends. The
fork does everything that the process would have done after its imports, on those same files. Only third-party
packages are imported here (and common.lazy_imports), so the code under test is read anew by every fork.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# what project code imports of the stack, directly or through NeMo
PRELOAD = ("nemo.collections.llm.api", "nemo_run", "torch.distributed.run", "torch.distributed.checkpoint")
_ABOVE = 600  # descriptors of the server itself, out of the way of those that a process hands over


@dataclass
class Server:
    """The processes served: connection -> process id of the fork."""

    listener: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    forks: dict[socket.socket, int] = field(default_factory=dict)

    def serve(self) -> dict[str, Any]:
        """Fork for every request. Returns the request, in the fork."""
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, self._close)
        while True:
            for key, _ in self.selector.select():
                request = key.data(key.fileobj)
                if request is not None:
                    return request  # type: ignore[no-any-return]

    def _accept(self, listener: socket.socket) -> dict[str, Any] | None:
        connection = _away(listener.accept()[0])
        request = _receive(connection)
        if request is None:
            return None
        pid = os.fork()
        if pid == 0:
            os.close(connection.detach())
            self._forget()
            return request
        for descriptor in request["received"]:
            os.close(descriptor)
        self.forks[connection] = pid
        ended = _above(os.pidfd_open(pid))
        self.selector.register(ended, selectors.EVENT_READ, lambda _: self._ended(connection, ended))
        self.selector.register(connection, selectors.EVENT_READ, lambda _: self._abandoned(connection))
        connection.sendall(f"{pid}\n".encode())
        return None

    def _ended(self, connection: socket.socket, pidfd: int) -> None:
        status = os.waitpid(self.forks.pop(connection), 0)[1]
        self.selector.unregister(pidfd)
        os.close(pidfd)
        with suppress(OSError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        with suppress(KeyError):  # the process may have been killed before its fork
            self.selector.unregister(connection)
        connection.close()

    def _abandoned(self, connection: socket.socket) -> None:
        """The process was killed: its fork is, too."""
        self.selector.unregister(connection)
        os.kill(self.forks[connection], signal.SIGKILL)

    def _close(self, _: object) -> NoReturn:
        for pid in self.forks.values():
            os.kill(pid, signal.SIGKILL)
        os._exit(0)

    def _forget(self) -> None:
        """In a fork: none of the server's descriptors."""
        self.selector.close()
        os.close(self.listener.detach())
        for connection in self.forks:
            os.close(connection.detach())


def _above(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    os.close(descriptor)
    return moved


def _away(connection: socket.socket) -> socket.socket:
    return socket.socket(fileno=_above(connection.detach()))


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """A request: its length and its descriptors, then its text."""
    head, received, _, _ = socket.recv_fds(connection, 8, 200)
    text = b""
    while head and len(text) < int.from_bytes(head, "big"):
        text += connection.recv(65536)
    if not head:
        return None
    request: dict[str, Any] = json.loads(text)
    request["received"] = [_above(descriptor) for descriptor in received]
    return request


def become(request: dict[str, Any]) -> None:
    """Take over the files, namespaces, folder, environment and signals of the process that asked."""
    os.setsid()
    descriptors = dict(zip(request["descriptors"], request["received"], strict=True))
    libc = ctypes.CDLL(None, use_errno=True)
    for name in [name for name in descriptors if isinstance(name, str)]:  # a namespace other than the server's
        if libc.setns(descriptors.pop(name), 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
    for number, descriptor in descriptors.items():
        os.dup2(descriptor, number)
    for descriptor in request["received"]:
        os.close(descriptor)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environ"])
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    _read_environment()


def _read_environment() -> None:
    """What the imported packages read from the environment when they were imported."""
    import torch
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    rank_zero_only.rank = _get_rank() or 0
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def run(request: dict[str, Any]) -> None:
    """Run the command line as the interpreter would."""
    words = list(request["command"])
    sys.orig_argv = list(words)
    while words[1].startswith("-") and words[1] not in ("-m", "-c"):
        option = words.pop(1)
        if option in ("-W", "-X"):
            words.pop(1)
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    kind = words[1] if words[1] in ("-m", "-c") else ""
    what, sys.argv = (words[2], ["-c" if kind == "-c" else words[2], *words[3:]]) if kind else (words[1], words[1:])
    sys.path[:] = [
        str(Path.cwd()) if kind == "-m" else "" if kind else str(Path(what).resolve().parent),
        *request["path"],
    ]
    importlib.invalidate_caches()
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        main = type(sys)("__main__")
        sys.modules["__main__"] = main
        exec(compile(what, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(what, run_name="__main__")


def _import_lazily() -> None:
    """What a run does not use is not imported here either. Of the project, only common.lazy_imports stays imported."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module("common.lazy_imports").install()
    del sys.path[0], sys.modules["common"]


def main(path: str) -> None:
    """Import, listen, and serve to the end; in a fork, go on as the process that asked."""
    low = [os.open(os.devnull, os.O_RDONLY) for _ in range(_ABOVE // 2)]  # files that packages keep open lie above
    _import_lazily()
    for name in PRELOAD:
        importlib.import_module(name)
    for descriptor in low:
        os.close(descriptor)
    gc.collect()
    gc.freeze()
    listener = _away(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(64)
    request = Server(listener).serve()
    become(request)
    run(request)


if __name__ == "__main__":
    main(sys.argv[1])
