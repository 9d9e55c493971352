"""Messages of the kernel that explain a failed run: processes killed for memory, GPU errors (Xid)."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_WANTED = re.compile(r"Out of memory: Killed process|Memory cgroup out of memory|oom-kill:|NVRM: Xid")
_DMESG = re.compile(r"^\[\s*(\d+\.\d+)\] (.*)")


@dataclass(frozen=True)
class KernelMessage:
    """One line of the kernel's log; time in Unix seconds."""

    time: float
    text: str


def read_kernel_messages(device: Path = Path("/dev/kmsg")) -> list[KernelMessage]:
    """The messages about memory and GPUs of this machine; none where they cannot be read (containers, users)."""
    lines = _read_device(device) or _read_dmesg()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return [KernelMessage(boot + seconds, text) for seconds, text in lines if _WANTED.search(text)]


def _read_device(device: Path) -> list[tuple[float, str]]:
    """All records of /dev/kmsg: `priority,sequence,microseconds,flags;text`."""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    found = []
    try:
        while record := os.read(descriptor, 8192):
            head, _, text = record.decode(errors="replace").partition(";")
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit():
                found.append((int(fields[2]) / 1e6, text.split("\n")[0]))
    except OSError:  # no further record, or one was overwritten while it was read
        pass
    finally:
        os.close(descriptor)
    return found


def _read_dmesg() -> list[tuple[float, str]]:
    try:
        output = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [(float(m[1]), m[2]) for line in output.splitlines() if (m := _DMESG.match(line))]
