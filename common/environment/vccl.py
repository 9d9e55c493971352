"""VCCL, a fork of NCCL: find the library, read what it is from the file itself, and put it before torch's NCCL.

https://github.com/sii-research/VCCL (from NCCL 2.26.6). It keeps NCCL's file name, libnccl.so.2, so only its
contents tell it apart: the names of its own variables.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError

FOLDERS = ("/opt/vccl/lib", "/opt/vccl/build/lib", "/usr/local/vccl/lib", "/workspace/VCCL/build/lib")
FILES = ("libvccl.so", "libnccl.so.2", "libnccl.so")
_VERSION = re.compile(rb"NCCL version (\d+)\.(\d+)\.(\d+)")
_OWN = b"NCCL_PASS_SM"
_ASK = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
version = ctypes.c_int()
for name in ("ncclAllReduce", "ncclCommInitRank", "ncclSend", "ncclRecv"):
    getattr(library, name)
assert library.ncclGetVersion(ctypes.byref(version)) == 0
print(version.value)
"""


@dataclass(frozen=True)
class Library:
    """A collectives library on disk: its file (links resolved) and its version as it says itself, `2.26.6`."""

    path: Path
    version: str


def candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where a VCCL may be: VCCL_LIBRARY alone if it is set, else LD_PRELOAD, LD_LIBRARY_PATH and usual folders."""
    if named := environ.get("VCCL_LIBRARY"):
        path = Path(named)
        yield from (path / name for name in FILES) if path.is_dir() else [path]
        return
    yield from (Path(word) for word in re.split(r"[ :]", environ.get("LD_PRELOAD", "")) if "ccl" in word)
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *FOLDERS]
    yield from (Path(folder) / name for folder in folders for name in FILES)


def find(environ: Mapping[str, str]) -> Library:
    """The first VCCL among the candidates.

    Raises:
        UserError: none there, or the named one is not what it should be.
    """
    refused = []
    for path in candidates(environ):
        if not path.is_file():
            continue
        try:
            return inspect(path)
        except UserError as problem:
            if environ.get("VCCL_LIBRARY"):
                raise
            refused.append(f"{path}: {problem.what}")
    raise UserError(
        "no VCCL library found",
        expected="libnccl.so.2 of a VCCL build, named by VCCL_LIBRARY or in " + ", ".join(FOLDERS),
        found="; ".join(refused) or f"nothing at {environ.get('VCCL_LIBRARY', 'these places')}",
        do="build it (https://github.com/sii-research/VCCL), then VCCL_LIBRARY=/path/to/build/lib",
    )


def inspect(path: Path) -> Library:
    """Read the version from the file, ask the library in a process of its own, and compare.

    Raises:
        UserError: not a shared library, not VCCL, it cannot be loaded, or the two versions differ.
    """
    path = path.resolve()
    data = path.read_bytes()
    if data[:4] != b"\x7fELF":
        raise _refused(path, "not a shared library", "an ELF file", f"it starts with {data[:4]!r}")
    written = {b".".join(found).decode() for found in _VERSION.findall(data)}
    if len(written) != 1:
        raise _refused(path, "not a build of NCCL", "one text 'NCCL version x.y.z' in the file", f"{len(written)}")
    if _OWN not in data:
        raise _refused(
            path, "this is plain NCCL, not VCCL", f"VCCL's variable {_OWN.decode()} in the file", f"NCCL {written}"
        )
    (version,) = written
    named = re.search(r"\.so\.(\d+\.\d+\.\d+)$", path.name)
    told = {"the text in the file": version, "ncclGetVersion": _ask(path)}
    if named:
        told["the file's name"] = named[1]
    if len(set(told.values())) > 1:
        raise _refused(path, "the library's versions disagree", "one version", str(told))
    return Library(path, version)


def _ask(path: Path) -> str:
    """What ncclGetVersion answers, in a child process: loading it may crash."""
    command = [sys.executable, "-I", "-c", _ASK, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        raise _refused(path, "loading it hangs", "an answer within 20 s", "none") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        raise _refused(path, "it cannot be loaded", "a library with NCCL's functions", words)
    number = int(done.stdout)  # 22606 is 2.26.6
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _refused(path: Path, what: str, expected: str, found: str) -> UserError:
    return UserError(
        f"{path}: {what}",
        expected=expected,
        found=found,
        do="VCCL_LIBRARY=/path/to/VCCL/build/lib/libnccl.so.2, or another --env",
    )


def settings(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """(key, value, source, reason) that load VCCL before torch's own NCCL.

    Raises:
        UserError: no usable library.
    """
    library = find(environ)
    told = f"VCCL on NCCL {library.version}, as the file says; torch links to it"
    return [
        (
            "LD_PRELOAD",
            _before(str(library.path), environ.get("LD_PRELOAD", "")),
            "vccl",
            told,
        ),
        (
            "LD_LIBRARY_PATH",
            _before(str(library.path.parent), environ.get("LD_LIBRARY_PATH", "")),
            "vccl",
            "for programs that look for libnccl.so.2 by name",
        ),
        ("VCCL_LIBRARY", str(library.path), "vccl", "every rank must have mapped this file (checked at its start)"),
    ]


def _before(first: str, others: str) -> str:
    rest = [word for word in others.split(":") if word and word != first]
    return ":".join([first, *rest])


def mapped(library: str) -> str | None:
    """None if this process has loaded `library`; otherwise which NCCL it has, or `none`."""
    maps = Path("/proc/self/maps").read_text()
    if library in maps:
        return None
    found = re.findall(r"\S*lib(?:nccl|vccl)\.so\S*", maps)
    return found[0] if found else "none"
