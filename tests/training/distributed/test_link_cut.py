"""Two hosts (network namespaces), one run, and a link that is cut in mid-run: both ranks end in time and say why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import python_path

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 10
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def _possible() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    made = subprocess.run(["ip", "netns", "add", "cpt-probe"], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", "cpt-probe"], capture_output=True)
    return made


pytestmark = [
    pytest.mark.nemo,
    pytest.mark.daemons,
    pytest.mark.skipif(
        not _possible(), reason="SKIPPED FOR LACK OF root, iproute2 or network namespaces: no link can be cut"
    ),
]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by one cable, each with a name and address of its own."""
    names = (f"cpt-{os.getpid()}-a", f"cpt-{os.getpid()}-b")
    for name in names:
        Path(f"/etc/netns/{name}").mkdir(parents=True)
        Path(f"/etc/netns/{name}/resolv.conf").write_text("")
        _ip("netns", "add", name)
    _ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
    for name, address in zip(names, ADDRESSES, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
        for device in ("veth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
    yield names
    for name in names:
        _ip("netns", "del", name)
        shutil.rmtree(f"/etc/netns/{name}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def prepared(written: Path, tmp_path: Path) -> Path:
    """A folder with a copy of runs/cut."""
    return Path(shutil.copytree(written, tmp_path / "prepared"))


@pytest.fixture(scope="module")
def written(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    _write_run(sample, folder)
    return folder


def _write_run(sample: Path, folder: Path, *words: str) -> None:
    """runs/cut, as a launcher that starts the ranks itself would have written it."""
    command = [sys.executable, str(ROOT / "launch.py"), "--recipe", "qwen25_tiny", "--executor", "local"]
    command += ["--name", "cut", "--devices", "2", "--dryrun", "--write", f"data.paths={sample / 'prose'}"]
    command += [f"data.index_mapping_dir={folder / 'cache'}", "trainer.max_steps=4000", "trainer.log_every_n_steps=1"]
    command += ["trainer.val_check_interval=4000", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _start(hosts: tuple[str, str], folder: Path, rank: int, **environ: str) -> subprocess.Popen[str]:
    shell = f"hostname node-{'ab'[rank]} && exec {sys.executable} -m launcher.rank_main runs/cut"
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "veth0"}
    variables |= {
        "CPT_PROCESS_GROUP_TIMEOUT_S": str(TIMEOUT_S),
        "PYTHONPATH": python_path(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        ["ip", "netns", "exec", hosts[rank], "unshare", "-u", "sh", "-c", shell],
        cwd=folder,
        env={**os.environ, **variables, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _trained(folder: Path, ranks: list[subprocess.Popen[str]], steps: int = 3) -> None:
    """Wait until the run is well under way."""
    metrics, end = folder / "runs" / "cut" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)


def _ends(ranks: list[subprocess.Popen[str]], within_s: float) -> list[str]:
    """What each rank says; all are gone after `within_s` seconds."""
    end = time.monotonic() + within_s
    try:
        return [rank.communicate(timeout=max(0.1, end - time.monotonic()))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _rank_states(folder: Path) -> list[dict[str, Any]]:
    logs = folder / "runs" / "cut" / "logs" / "attempt-1"
    return [json.loads((logs / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def test_a_cut_link_ends_both_ranks_in_time_and_names_the_other(hosts: tuple[str, str], prepared: Path) -> None:
    ranks = [_start(hosts, prepared, rank) for rank in (0, 1)]
    _trained(prepared, ranks)
    _ip("-n", hosts[0], "link", "set", "veth0", "down")
    cut = time.monotonic()
    said = _ends(ranks, TIMEOUT_S + 15)
    assert time.monotonic() - cut < TIMEOUT_S + 12, said
    assert [rank.returncode for rank in ranks] == [1, 1], said
    for rank, (text, state) in enumerate(zip(said, _rank_states(prepared), strict=True)):
        other = 1 - rank
        assert f"lost rank {other} on node-{'ab'[other]} ({ADDRESSES[other]})" in text
        assert "its host does not answer" in text
        assert f"within {TIMEOUT_S} s" in text
        assert state["state"] == "failed" and f"lost rank {other}" in state["error"]


def test_a_killed_rank_is_named_at_once(hosts: tuple[str, str], prepared: Path) -> None:
    ranks = [_start(hosts, prepared, rank) for rank in (0, 1)]
    _trained(prepared, ranks)
    os.kill(_rank_states(prepared)[1]["pid"], signal.SIGKILL)
    killed = time.monotonic()
    text = _ends(ranks, TIMEOUT_S)[0]
    assert time.monotonic() - killed < TIMEOUT_S
    assert "lost rank 1 on node-b (10.231.7.2): its process is gone" in text


def test_a_node_with_other_data_is_refused(hosts: tuple[str, str], sample: Path, tmp_path: Path) -> None:
    """Both nodes have the corpus at the same place; on one it is another."""
    mine = Path(shutil.copytree(sample / "prose", tmp_path / "mine"))
    other = Path(shutil.copytree(sample / "code", tmp_path / "other"))
    _write_run(sample, tmp_path, f"data.paths={mine}")
    shell = f"mount --bind {other} {mine} && exec {sys.executable} -m launcher.rank_main runs/cut"
    (tmp_path / "node-b").write_text(shell)
    first = _start(hosts, tmp_path, 0)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    variables |= {"GLOO_SOCKET_IFNAME": "veth0", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29511"}
    variables |= {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    second = subprocess.Popen(
        ["ip", "netns", "exec", hosts[1], "unshare", "-um", "sh", "-c", f"hostname node-b && {shell}"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = _ends([first, second], 90)
    assert [first.returncode, second.returncode] == [3, 3], said
    for text in said:
        assert f"the ranks are not alike: data in {mine}" in text
        assert "rank 1 on node-b (10.231.7.2) has" in text
    assert not (tmp_path / "runs" / "cut" / "checkpoints").exists()
