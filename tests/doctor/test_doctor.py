"""The doctor on machines that are broken for real: shared memory, port, host name, network interface."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from common.environment.merge import parse_layers, resolve_environment
from doctor import ladder
from doctor.checks import SUPPORTED, TRANSFORMER_ENGINE

ROOT = Path(__file__).resolve().parents[2]
DOCTOR = f"{sys.executable} {ROOT / 'launch.py'} doctor --json"
namespaces = pytest.mark.skipif(
    os.geteuid() != 0
    or not shutil.which("unshare")
    or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="SKIPPED FOR LACK OF root with mount namespaces: /dev/shm and the host name cannot be broken",
)


def _doctor(shell: str, *wrap: str, cwd: Path, **environ: str) -> tuple[int, dict[str, dict], list[dict]]:
    """Exit code, checks by name, rungs of a doctor inside `shell`."""
    command = [*wrap, "sh", "-c", shell]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    return done.returncode, {check["name"]: check for check in told["checks"]}, told["rungs"]


def test_a_whole_machine(tmp_path: Path) -> None:
    code, checks, rungs = _doctor(f"{DOCTOR} --write way.env", cwd=tmp_path)
    assert [name for name, check in checks.items() if check["level"] == "error"] == []
    assert code == 0
    assert rungs[0]["failed"] == "" and rungs[0]["seconds"]
    assert set(rungs[0]["found"]) == set(ladder.STEPS)
    assert len(rungs) == 1  # the first way holds: no other is tried
    assert parse_layers(str(tmp_path / "way.env"))[1][1] == {}


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
    code, checks, rungs = _doctor(f"hostname nosuch-host && {DOCTOR}", "unshare", "-u", cwd=tmp_path)
    assert code == 3
    assert checks["host name"]["level"] == "error"
    assert "nosuch-host" in checks["host name"]["found"]
    assert "GLOO_SOCKET_IFNAME=lo" in checks["host name"]["do"]
    assert rungs[0]["failed"] == ""  # torch falls back to the loopback address


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        code, checks, _ = _doctor(DOCTOR, cwd=tmp_path, MASTER_PORT=str(port))
    assert code == 3
    assert checks["port"]["level"] == "error"
    assert f"MASTER_PORT={port} is taken" in checks["port"]["found"]


def test_the_rung_below_is_found_and_written(tmp_path: Path) -> None:
    """An interface that is not there: Gloo's own words, the loopback rung holds, and its set works from the file."""
    code, _, rungs = _doctor(f"{DOCTOR} --write way.env", cwd=tmp_path, GLOO_SOCKET_IFNAME="nosuch0")
    assert code == 3
    assert rungs[0]["failed"] == "init"
    assert "nosuch0" in rungs[0]["why"] or "device" in rungs[0]["why"].lower()
    assert rungs[1]["failed"] == ""
    found = {s.key: s.value for s in resolve_environment(f"cpu+{tmp_path / 'way.env'}", {})}
    assert found["GLOO_SOCKET_IFNAME"] == "lo"
    shell = f". {tmp_path / 'way.env'} && {DOCTOR}"
    assert _doctor(shell, cwd=tmp_path, GLOO_SOCKET_IFNAME="nosuch0")[0] == 0


def test_a_rank_that_hangs_is_ended_at_the_limit() -> None:
    """A rung of two whose ranks are given no time: it ends, and says where it stood."""
    assert ladder._warm(60) == ""  # the server that imports torch is up
    result = ladder.attempt(ladder.rungs(0, 2)[0], 0.02)
    assert result.failed in ladder.STEPS
    assert "no answer within" in result.why
    assert result.wall_s < 5


def test_a_device_that_is_not_there() -> None:
    result = ladder.attempt(ladder.Rung("one GPU", "nccl", "cuda", 1), 15)
    assert result.failed == "device"
    assert "cuda" in result.why.lower()


def test_the_ladder_by_gpus() -> None:
    assert [rung.world_size for rung in ladder.rungs(2, 2)] == [2, 2, 2, 2, 2, 2, 1]
    assert {rung.world_size for rung in ladder.rungs(8, 1)} == {1}
    layers = {rung.layer: rung.env for rung in ladder.rungs(2, 2) if rung.layer}
    for name, table in layers.items():
        assert {k: v for k, (v, _) in table.items()} == {k: v for k, (v, _) in parse_layers(name)[1][1].items()}


def test_the_supported_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for name, (versions, _) in SUPPORTED.items():
        assert f'"{name}{versions}"' in text
    assert f"transformer_engine[pytorch]{TRANSFORMER_ENGINE}" in text


def test_bench_measures_every_way(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.collectives", "--mib", "0.5,1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["way"] for row in rows] == [rung.name for rung in ladder.rungs(0, 2)]
    assert set(rows[0]["bus_gb_s"]) == {"0.5", "1"}
    assert min(rows[0]["ms"].values()) > 0
