"""The doctor on machines that are really broken: shared memory, port, host name, network interface."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.environment.merge import parse_layers, resolve_environment
from doctor.checks import SUPPORTED, TRANSFORMER_ENGINE
from doctor.transport_check import check_transport, import_torch
from doctor.transports import STEPS, Transport, list_transports

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = f"{sys.executable} {ROOT / 'launch.py'} doctor --json"
namespaces = pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("unshare")
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="SKIPPED FOR LACK OF root with mount namespaces: /dev/shm and the host name cannot be broken",
)


def _doctor(
    shell: str, *wrap: str, cwd: Path, **environ: str
) -> tuple[int, dict[str, dict[str, str]], list[dict[str, Any]]]:
    """Exit code, checks by name, and transports of a doctor that runs inside `shell`."""
    command = [*wrap, "sh", "-c", shell]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in found["checks"]}, found["transports"]


def test_a_machine_in_order(tmp_path: Path) -> None:
    code, checks, transports = _doctor(f"{DOCTOR} --write way.env", cwd=tmp_path)
    assert [name for name, check in checks.items() if check["level"] == "error"] == []
    assert code == 0
    assert transports[0]["failed"] == "" and transports[0]["seconds"]
    assert set(transports[0]["found"]) == set(STEPS)
    assert len(transports) == 1  # the first transport works: no other is tested
    assert parse_layers(str(tmp_path / "way.env"))[1][1] == {}


def test_exactly_the_set_that_is_asked_for(tmp_path: Path) -> None:
    """A set's variables reach the ranks: one that breaks Gloo breaks the test; no other transport is tried."""
    code, checks, transports = _doctor(f"{DOCTOR} --env cpu", cwd=tmp_path)
    assert code == 0 and [t["transport"]["name"] for t in transports] == ["--env cpu"]
    assert set(transports[0]["step_seconds"]) == set(STEPS)
    assert any(name.startswith("network ") for name in checks)
    (tmp_path / "bad.env").write_text("GLOO_SOCKET_IFNAME=nosuch0\n")
    code, _, transports = _doctor(f"{DOCTOR} --env +./bad.env", cwd=tmp_path)
    assert code == 3 and len(transports) == 1 and transports[0]["failed"] == "init"


@namespaces
@pytest.mark.parametrize(("options", "words"), [("size=64k", "0.1 MiB free"), ("ro", "Read-only")])
def test_broken_shared_memory(options: str, words: str, tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o {options} tmpfs /dev/shm"
    code, checks, _ = _doctor(f"{mount} && {DOCTOR}", "unshare", "-m", cwd=tmp_path)
    assert code == 3
    assert checks["shared memory"]["level"] == "error"
    assert words in checks["shared memory"]["found"]
    assert "--ipc=host" in checks["shared memory"]["do"]


@namespaces
def test_a_host_name_that_does_not_resolve(tmp_path: Path) -> None:
    code, checks, transports = _doctor(f"hostname nosuch-host && {DOCTOR}", "unshare", "-u", cwd=tmp_path)
    assert code == 3
    assert checks["host name"]["level"] == "error"
    assert "nosuch-host" in checks["host name"]["found"]
    assert "GLOO_SOCKET_IFNAME=lo" in checks["host name"]["do"]
    assert transports[0]["failed"] == ""  # torch falls back to the loopback address


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, checks, _ = _doctor(DOCTOR, cwd=tmp_path, MASTER_PORT=str(port))
    assert code == 3
    assert checks["port"]["level"] == "error"
    assert f"MASTER_PORT={port} is taken" in checks["port"]["found"]


def test_the_next_transport_is_found_and_written(tmp_path: Path) -> None:
    """A missing interface: Gloo's error is quoted, the loopback transport works, and the file written for it too."""
    code, _, transports = _doctor(f"{DOCTOR} --write way.env", cwd=tmp_path, GLOO_SOCKET_IFNAME="nosuch0")
    assert code == 3
    assert transports[0]["failed"] == "init"
    assert "nosuch0" in transports[0]["why"] or "device" in transports[0]["why"].lower()
    assert transports[1]["failed"] == ""
    found = {s.key: s.value for s in resolve_environment(f"cpu+{tmp_path / 'way.env'}", {})}
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    shell = f". {tmp_path / 'way.env'} && {DOCTOR}"
    assert _doctor(shell, cwd=tmp_path, GLOO_SOCKET_IFNAME="nosuch0")[0] == 0


def test_a_rank_that_hangs_is_ended_at_the_limit() -> None:
    """Two ranks that are given no time: the test ends, and names the step that was not reached."""
    assert import_torch(60) == ""  # the server is ready
    result = check_transport(list_transports(0, 2)[0], 0.02)
    assert result.failed in STEPS
    assert "did not answer within" in result.why
    assert result.wall_s < 5


def test_a_device_that_is_not_there() -> None:
    result = check_transport(Transport("one GPU", "nccl", "cuda", 1), 15)
    assert result.failed == "device"
    assert "cuda" in result.why.lower()


def test_transports_by_number_of_gpus() -> None:
    assert [t.world_size for t in list_transports(2, 2)] == [2, 2, 2, 2, 2, 2, 1]
    assert {t.world_size for t in list_transports(8, 1)} == {1}
    for transport in list_transports(2, 2):
        if transport.env_set:
            table = parse_layers(transport.env_set)[1][1]
            assert {k: v for k, (v, _) in transport.env.items()} == {k: v for k, (v, _) in table.items()}


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, (versions, _) in SUPPORTED.items():
        assert f'"{name}{versions}"' in text
    assert f"transformer_engine[pytorch]{TRANSFORMER_ENGINE}" in text


def test_bench_measures_every_transport(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.collectives", "--mib", "0.5,1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["way"] for row in rows] == [t.name for t in list_transports(0, 2)]
    assert set(rows[0]["bus_gb_s"]) == {"0.5", "1"}
    assert min(rows[0]["ms"].values()) > 0
