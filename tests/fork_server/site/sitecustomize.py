"""Imported by every Python process that finds this folder on its path: a served one hands itself to the fork server.

Served is what would import NeMo or torch: a recipe's command line, torchrun, the ranks, what multiprocessing spawns
for them, the workers of pytest-xdist, and a test's own script that begins with `# served`. A process with a preloaded
library is not: only a process that really starts has it. See ../server.py.
"""

import json
import os
import signal
import socket
import sys
import time

MODULES = ("launcher.rank_main", "doctor.node_rank", "torch.distributed.run")


def _served(words: list[str]) -> bool:
    if os.environ.get("LD_PRELOAD"):
        return False
    words = list(words[1:])
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    if words[:1] == ["-m"]:
        return words[1] in MODULES
    if words[:1] == ["-c"]:
        return words[1].startswith(
            (
                "# served\n",
                "from multiprocessing.spawn ",
                "from multiprocessing.forkserver ",
                "import sys;exec(eval(sys.stdin",
            )
        )
    name = words[0].rsplit("/", 1)[-1] if words else ""
    return name == "torchrun" or (name == "launch.py" and bool({"--recipe", "resume"} & set(words)))


def _descriptors(connection: socket.socket) -> "dict[int | str, int]":
    """Open files by number, and the namespaces by name where they may be others than the server's."""
    found: dict[int | str, int] = {}
    for word in os.listdir("/proc/self/fd"):  # noqa: PTH208 - every process reads this file: pathlib is slow to import
        number = int(word)
        try:
            os.fstat(number)
        except OSError:
            continue  # it was listdir's own
        if number != connection.fileno():
            found[number] = number
    for name in ("net", "uts", "mnt") if os.geteuid() == 0 else ():
        found[name] = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    return found


def _connect(path: str) -> socket.socket:
    """The server listens when it has imported everything."""
    end = time.monotonic() + 300
    while True:
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            return connection
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _hand_over(path: str) -> None:
    connection = _connect(path)
    every = set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, every)
    found = _descriptors(connection)
    umask = os.umask(0)
    request = {
        "command": sys.orig_argv,
        "environ": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "path": sys.path,
        "umask": umask,
        "ignored": [int(s) for s in every if signal.getsignal(s) is signal.SIG_IGN and s not in (13, 25)],
        "descriptors": list(found),
    }
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "big")], list(found.values()))
    connection.sendall(text)
    for number in found.values():
        os.close(number)
    answers = connection.makefile("r")
    pid = int(answers.readline())
    for number in every:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda caught, _: os.kill(pid, caught))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, every)
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if "CPT_FORK_SERVER" in os.environ and _served(sys.orig_argv):
    try:
        _hand_over(os.environ["CPT_FORK_SERVER"])
    except BaseException as error:
        sys.stderr.write(f"fork server: {error!r}\n")
        os._exit(70)
