"""A real shared library with NCCL's entry points, which claims to be what a test wants."""

from __future__ import annotations

import subprocess
from pathlib import Path


def build(folder: Path, *, text: str = "2.26.6", number: int = 22606, own: bool = True, body: str = "") -> Path:
    """Compile folder/libnccl.so.2.

    Args:
        text, number: the version in the file's text, and what ncclGetVersion returns.
        own: with the name of one of VCCL's own variables in it.
        body: more C code.
    """
    functions = " ".join(f"int {name}(void) {{ return 0; }}" for name in ("ncclAllReduce", "ncclCommInitRank"))
    functions += " int ncclSend(void) { return 0; } int ncclRecv(void) { return 0; }"
    marks = f'const char *v = "NCCL version {text}+cuda12.4"; const char *o = "{"NCCL_PASS_SM" if own else "x"}";'
    source = folder / "nccl.c"
    source.write_text(f"{marks} {functions} int ncclGetVersion(int *v) {{ *v = {number}; return 0; }} {body}")
    target = folder / "libnccl.so.2"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return target
