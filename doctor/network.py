"""Network interfaces and InfiniBand ports with their state and speed, from /sys: what ibstat and `rdma link` show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from doctor.checks import Check

SYS = Path("/sys/class")
_VIRTUAL = ("veth", "docker", "br-", "virbr", "cni", "flannel", "dummy", "tun", "tap", "ifb", "sit", "ip6tnl")


def check_network(sys: Path = SYS) -> Iterator[Check]:
    """One result per interface and per InfiniBand or RoCE port.

    Args:
        sys: the folder that holds `net` and `infiniband`.
    """
    for folder in sorted((sys / "net").glob("*")):
        if folder.name != "lo" and folder.is_dir() and not folder.name.startswith(_VIRTUAL):
            yield Check(f"network {folder.name}", "ok", _describe_interface(folder))
    for port in sorted((sys / "infiniband").glob("*/ports/*")):
        yield _check_port(f"{port.parent.parent.name}:{port.name}", port)


def _describe_interface(folder: Path) -> str:
    """`up, 25000 Mb/s, MTU 9000`; virtual machines report no speed."""
    megabits = _read(folder / "speed")
    speed = f"{megabits} Mb/s" if megabits.isdigit() else "speed not reported"
    return f"{_read(folder / 'operstate') or 'state unknown'}, {speed}, MTU {_read(folder / 'mtu')}"


def _check_port(name: str, port: Path) -> Check:
    """`ACTIVE, 400 Gb/sec (4X NDR), InfiniBand`."""
    state = _read(port / "state").partition(": ")[2] or "state unknown"
    found = f"{state}, {_read(port / 'rate')}, {_read(port / 'link_layer')}"
    if state == "ACTIVE":
        return Check(f"RDMA {name}", "ok", found)
    do = f"`ibstat {name.partition(':')[0]}` says why; NCCL_IB_HCA=^={name} leaves the port out"
    return Check(f"RDMA {name}", "warning", found, do)


def _read(path: Path) -> str:
    """The text of a file of /sys; empty where the driver gives none (the speed of an interface that is down)."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
