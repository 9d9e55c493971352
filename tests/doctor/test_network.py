"""Interfaces and ports as /sys shows them, and the word for each transport."""

from __future__ import annotations

from pathlib import Path

from common.environment.merge import resolve_environment
from doctor.network import check_network
from doctor.tables import steps_table
from doctor.transports import STEPS, Transport, TransportResult, list_transports, transport_of_set


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_interfaces_and_ports_with_state_and_speed(tmp_path: Path) -> None:
    _write(tmp_path / "net" / "lo", operstate="unknown", mtu="65536")
    _write(tmp_path / "net" / "veth1", operstate="up", mtu="1500")
    _write(tmp_path / "net" / "ib0", operstate="up", speed="400000", mtu="4092")
    _write(tmp_path / "net" / "eth0", operstate="down", speed="-1", mtu="1500")
    (tmp_path / "net" / "bonding_masters").write_text("")
    ports = tmp_path / "infiniband"
    _write(ports / "mlx5_0/ports/1", state="4: ACTIVE", rate="400 Gb/sec (4X NDR)", link_layer="InfiniBand")
    _write(ports / "mlx5_1/ports/1", state="1: DOWN", rate="10 Gb/sec (4X SDR)", link_layer="Ethernet")
    found = {check.name: check for check in check_network(tmp_path)}
    assert {name: (check.level, check.found) for name, check in found.items()} == {
        "network eth0": ("ok", "down, speed not reported, MTU 1500"),
        "network ib0": ("ok", "up, 400000 Mb/s, MTU 4092"),
        "RDMA mlx5_0:1": ("ok", "ACTIVE, 400 Gb/sec (4X NDR), InfiniBand"),
        "RDMA mlx5_1:1": ("warning", "DOWN, 10 Gb/sec (4X SDR), Ethernet"),
    }
    assert "NCCL_IB_HCA=^=mlx5_1:1" in found["RDMA mlx5_1:1"].do
    assert list(check_network(tmp_path / "nowhere")) == []


def test_a_mode_is_one_word() -> None:
    modes = [transport.mode for transport in list_transports(2, 2)]
    assert modes == ["nccl", "nccl-no-p2p", "nccl-no-shm", "nccl-no-p2p-no-shm", "nccl-loopback", "gloo", "single"]
    assert [transport.mode for transport in list_transports(0, 2)] == ["gloo", "gloo", "single", "single"]


def test_a_set_is_one_transport_with_its_variables() -> None:
    made = {
        name: transport_of_set(name, resolve_environment(name, {}), 2, 2) for name in ("dual", "nccl-no-shm", "gloo")
    }
    assert [(t.mode, t.backend) for t in made.values()] == [("nccl", "nccl"), ("nccl-no-shm", "nccl"), ("gloo", "gloo")]
    assert made["dual"].env["OMP_NUM_THREADS"][0] == "4"
    assert transport_of_set("dual", [], 0, 2).device == "cpu"


def test_every_step_until_the_first_that_fails() -> None:
    transport = Transport("t", "nccl", "cuda", 2)
    found = {"device": "NVIDIA H100", "init": "nccl 2.27.3, NCCL in /x/libnccl.so.2"}
    table = steps_table(TransportResult(transport, "all_reduce", "no route", found, {}, {"device": 0.5, "init": 1.25}))
    rows = list(zip(*(list(column.cells) for column in table.columns), strict=True))
    assert rows == [
        ("device", "[green]ok[/]", "0.50", "NVIDIA H100"),
        ("init", "[green]ok[/]", "1.25", "nccl 2.27.3, NCCL in /x/libnccl.so.2"),
        ("all_reduce", "[red]fails[/]", "", "no route"),
    ]
    works = TransportResult(transport, "", "", dict.fromkeys(STEPS, "x"), {2**20: 0.001}, {})
    assert len(steps_table(works).rows) == len(STEPS)
    assert steps_table(TransportResult(transport, "torch", "not installed")).row_count == 1
