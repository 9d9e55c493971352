"""VCCL, a fork of NCCL: find the library, check that it is one, and have it loaded instead of torch's NCCL.

https://github.com/sii-research/VCCL (from NCCL 2.26.6). It keeps NCCL's file name, libnccl.so.2, so that only the
names of its own variables inside the file distinguish it from NCCL.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from common.errors import PreflightError, UserError

SETS = ("vccl", "vccl-ft")  # the environment sets that load it
PRELOADS = ("LD_PRELOAD", "LD_LIBRARY_PATH")  # which the dynamic linker reads when a process starts
LIBRARY_KEY = "VCCL_LIBRARY"
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
    if named := environ.get(LIBRARY_KEY):
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
            if environ.get(LIBRARY_KEY):
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
    version = _read_version(path)
    named = re.search(r"\.so\.(\d+\.\d+\.\d+)$", path.name)
    versions = {"the text in the file": version, "ncclGetVersion": _load_version(path)}
    if named:
        versions["the file's name"] = named[1]
    if len(set(versions.values())) > 1:
        raise _library_error(path, "the library's versions disagree", "one version", str(versions))
    return Library(path, version)


def _read_version(path: Path) -> str:
    """The version that the file of a VCCL holds as text; the library is not loaded.

    Raises:
        UserError: not a shared library, or not VCCL.
    """
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
    return written.pop()


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
    """The variables that load VCCL before torch's own NCCL on this machine, as (key, value, source, reason).

    Raises:
        UserError: no usable library.
    """
    library = find_library(environ)
    reason = f"VCCL on NCCL {library.version}, as the file says; torch links to it"
    linker = _linker_variables(library, environ)
    return [
        ("LD_PRELOAD", linker["LD_PRELOAD"], "vccl", reason),
        ("LD_LIBRARY_PATH", linker["LD_LIBRARY_PATH"], "vccl", "for programs that look for libnccl.so.2 by name"),
        (LIBRARY_KEY, str(library.path), "vccl", "every rank must have mapped this file (checked at its start)"),
    ]


def settings_elsewhere(environ: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """The variable that tells ranks on other machines where their VCCL is: `start_again_with_vccl` loads it there.

    Raises:
        UserError: nothing says where the library is on those machines.
    """
    named = environ.get(LIBRARY_KEY, "")
    if not named.startswith("/"):
        raise UserError(
            "where the VCCL library is on the machines that train is not said",
            expected=f"{LIBRARY_KEY}, the absolute path of the library or of its folder there",
            found=repr(named) if named else f"no {LIBRARY_KEY}",
            do=f"write it into the cluster file, `env: {{{LIBRARY_KEY}: /opt/vccl/lib}}`",
        )
    reason = "each rank checks the library there, and starts again with LD_PRELOAD set to it"
    return [(LIBRARY_KEY, named, "vccl", reason)]


def _linker_variables(library: Library, environ: Mapping[str, str]) -> dict[str, str]:
    return {
        "LD_PRELOAD": _prepend(str(library.path), environ.get("LD_PRELOAD", "")),
        "LD_LIBRARY_PATH": _prepend(str(library.path.parent), environ.get("LD_LIBRARY_PATH", "")),
    }


def _prepend(first: str, others: str) -> str:
    rest = [word for word in others.split(":") if word and word != first]
    return ":".join([first, *rest])


def asked_library(rows: Iterable[Mapping[str, str]]) -> str:
    """Where a run wants its VCCL from: the library or its folder, from the rows of env.json; empty without VCCL."""
    found = [row["value"] for row in rows if row["key"] == LIBRARY_KEY and row["source"] == "vccl"]
    return found[0] if found else ""


def start_again_with_vccl(asked: str, environ: Mapping[str, str]) -> None:
    """In a rank, before anything else: start this process again with its VCCL loaded; returns if there is no need.

    The library is checked on this machine first. One that cannot be used is left to `check_mapped`, whose error is
    recorded as that of the rank.

    Args:
        asked: the library or its folder on this machine; empty for a run without VCCL.
    """
    if not asked or asked in environ.get("LD_PRELOAD", "").split(":"):
        return
    try:
        library = find_library({LIBRARY_KEY: asked})
    except UserError:
        return
    if other_nccl_in_memory(str(library.path)) is None:
        return
    wanted = {**_linker_variables(library, environ), LIBRARY_KEY: str(library.path)}
    if wanted["LD_PRELOAD"] != environ.get("LD_PRELOAD"):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **wanted})


def check_mapped(asked: str) -> Library | None:
    """Check that this process has loaded the VCCL that its run asks for.

    Args:
        asked: the library or its folder on this machine; empty for a run without VCCL.

    Returns:
        the library; None for a run without VCCL.

    Raises:
        UserError: there is no usable library.
        PreflightError: this process has loaded another one.
    """
    if not asked:
        return None
    for path in candidates({LIBRARY_KEY: asked}):
        if path.is_file() and other_nccl_in_memory(str(path)) is None:
            return Library(path.resolve(), _read_version(path))
    library = find_library({LIBRARY_KEY: asked})
    raise PreflightError(
        "VCCL is not loaded in this rank",
        expected=str(library.path),
        found=other_nccl_in_memory(str(library.path)) or "",
        do=f"LD_PRELOAD={library.path}: the dynamic linker did not take it when this process started",
    )


def other_nccl_in_memory(library: str) -> str | None:
    """None if this process has loaded `library`; otherwise the path of the NCCL that it has loaded, or `none`."""
    mapped = _mapped_files()
    if os.path.realpath(library) in mapped:
        return None
    found = _libraries(mapped)
    return found[0] if found else "none"


def describe_loaded() -> str:
    """The collectives library that this process has loaded: its path, and whether it is VCCL."""
    found = _libraries(_mapped_files())
    if not found:
        return "built into torch"
    return f"{'VCCL' if _VCCL_VARIABLE in Path(found[0]).read_bytes() else 'NCCL'} in {found[0]}"


def _mapped_files() -> set[str]:
    return {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}


def _libraries(files: Iterable[str]) -> list[str]:
    return sorted(path for path in files if re.search(r"/lib(?:nccl|vccl)\.so[^/]*$", path))
