"""VCCL, a fork of NCCL: find the library, check that it is one, and have it loaded instead of torch's NCCL.

https://github.com/sii-research/VCCL (from NCCL 2.26.6). It keeps NCCL's file name, libnccl.so.2, so that only the
names of its own variables inside the file distinguish it from NCCL.
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
_VCCL_VARIABLE = b"NCCL_PASS_SM"
_PRINT_VERSION = """
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
    """A collectives library on disk: its file (links resolved) and its own version, such as `2.26.6`."""

    path: Path
    version: str


def candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where a VCCL may be: only VCCL_LIBRARY if it is set, else LD_PRELOAD, LD_LIBRARY_PATH and the usual folders."""
    if named := environ.get("VCCL_LIBRARY"):
        path = Path(named)
        yield from (path / name for name in FILES) if path.is_dir() else [path]
        return
    yield from (Path(word) for word in re.split(r"[ :]", environ.get("LD_PRELOAD", "")) if "ccl" in word)
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *FOLDERS]
    yield from (Path(folder) / name for folder in folders for name in FILES)


def find_library(environ: Mapping[str, str]) -> Library:
    """Find the first VCCL among the candidates.

    Raises:
        UserError: there is none, or VCCL_LIBRARY names something else.
    """
    refused = []
    for path in candidates(environ):
        if not path.is_file():
            continue
        try:
            return check_library(path)
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


def check_library(path: Path) -> Library:
    """Check that a file is a VCCL: its version as text, and as the library gives it in a process of its own, agree.

    Raises:
        UserError: not a shared library, not VCCL, not loadable, or the versions differ.
    """
    path = path.resolve()
    data = path.read_bytes()
    if data[:4] != b"\x7fELF":
        raise _library_error(path, "not a shared library", "an ELF file", f"it starts with {data[:4]!r}")
    written = {b".".join(found).decode() for found in _VERSION.findall(data)}
    if len(written) != 1:
        raise _library_error(
            path, "not a build of NCCL", "one text 'NCCL version x.y.z' in the file", f"{len(written)}"
        )
    if _VCCL_VARIABLE not in data:
        raise _library_error(
            path,
            "this is plain NCCL, not VCCL",
            f"VCCL's variable {_VCCL_VARIABLE.decode()} in the file",
            f"NCCL {written}",
        )
    (version,) = written
    named = re.search(r"\.so\.(\d+\.\d+\.\d+)$", path.name)
    versions = {"the text in the file": version, "ncclGetVersion": _load_version(path)}
    if named:
        versions["the file's name"] = named[1]
    if len(set(versions.values())) > 1:
        raise _library_error(path, "the library's versions disagree", "one version", str(versions))
    return Library(path, version)


def _load_version(path: Path) -> str:
    """What ncclGetVersion returns, in a child process because loading the library may crash."""
    command = [sys.executable, "-I", "-c", _PRINT_VERSION, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        raise _library_error(path, "loading it hangs", "an answer within 20 s", "none") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        raise _library_error(path, "it cannot be loaded", "a library with NCCL's functions", words)
    number = int(done.stdout)  # 22606 is 2.26.6
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _library_error(path: Path, what: str, expected: str, found: str) -> UserError:
    return UserError(
        f"{path}: {what}",
        expected=expected,
        found=found,
        do="VCCL_LIBRARY=/path/to/VCCL/build/lib/libnccl.so.2, or another --env",
    )


def preload_settings(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """The variables that load VCCL before torch's own NCCL, as (key, value, source, reason).

    Raises:
        UserError: no usable library.
    """
    library = find_library(environ)
    reason = f"VCCL on NCCL {library.version}, as the file says; torch links to it"
    return [
        (
            "LD_PRELOAD",
            _prepend(str(library.path), environ.get("LD_PRELOAD", "")),
            "vccl",
            reason,
        ),
        (
            "LD_LIBRARY_PATH",
            _prepend(str(library.path.parent), environ.get("LD_LIBRARY_PATH", "")),
            "vccl",
            "for programs that look for libnccl.so.2 by name",
        ),
        ("VCCL_LIBRARY", str(library.path), "vccl", "every rank must have mapped this file (checked at its start)"),
    ]


def _prepend(first: str, others: str) -> str:
    rest = [word for word in others.split(":") if word and word != first]
    return ":".join([first, *rest])


def other_nccl_in_memory(library: str) -> str | None:
    """None if this process has loaded `library`; otherwise the path of the NCCL that it has loaded, or `none`."""
    maps = Path("/proc/self/maps").read_text()
    if library in maps:
        return None
    found = re.findall(r"\S*lib(?:nccl|vccl)\.so\S*", maps)
    return found[0] if found else "none"
