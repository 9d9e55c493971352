"""A real dockerd builds the Dockerfile on a stand-in for NVIDIA's image, and `--executor docker` trains in it."""

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

import pytest

from tests.common.environment import nccl_stub
from tests.launcher.executors import blended

pytestmark = [pytest.mark.nemo, pytest.mark.daemons]

ROOT = Path(__file__).resolve().parents[3]
BASE = "nvcr.io/nvidia/nemo:25.04"
BUILT = "qwen25-cpt:test"


@pytest.fixture(scope="module")
def dockerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which this daemon is found; host network, no bridge."""
    missing = [name for name in ("dockerd", "containerd", "mmdebstrap") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        pytest.skip(f"NO DOCKER HERE: {', '.join(missing) + ' not installed' if missing else 'needs root'}")
    folder = tmp_path_factory.mktemp("dockerd")
    env = {**os.environ, "DOCKER_HOST": f"unix://{folder}/docker.sock"}
    words = [f"--host=unix://{folder}/docker.sock", f"--data-root={folder}/data", f"--exec-root={folder}/exec"]
    words += [f"--pidfile={folder}/pid", "--iptables=false", "--ip6tables=false", "--bridge=none"]
    with (folder / "log").open("w") as out:
        daemon = subprocess.Popen(["dockerd", *words], stdout=out, stderr=out)
    try:
        _wait_for_daemon(env["DOCKER_HOST"], daemon, folder / "log")
        yield env
    finally:
        daemon.terminate()
        daemon.wait(timeout=30)


def _wait_for_daemon(host: str, daemon: subprocess.Popen[bytes], said: Path) -> None:
    import docker

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and daemon.poll() is None:
        try:
            docker.DockerClient(base_url=host).ping()
            return
        except Exception:
            time.sleep(0.3)
    pytest.skip(f"NO DOCKER HERE: dockerd does not come up:\n{said.read_text()[-800:]}")


@pytest.fixture(scope="module")
def image(dockerd: dict[str, str], checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Our Dockerfile, built on Debian under NVIDIA's name; what its pip installs lies in that base."""
    import docker

    folder = tmp_path_factory.mktemp("base")
    wheels = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--dest",
        str(folder / "wheels"),
        "gigatoken==0.10.0",
    ]
    subprocess.run(wheels, check=True, capture_output=True)
    (folder / "pip.conf").write_text("[global]\nno-index = true\nno-deps = true\nfind-links = /wheels\n")
    release = dict(row.split("=", 1) for row in Path("/etc/os-release").read_text().splitlines() if "=" in row)
    suite = release["VERSION_CODENAME"]
    hooks = [f"copy-in {folder}/wheels /", f"upload {folder}/pip.conf /etc/pip.conf"]
    hooks.append('rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED')
    command = ["mmdebstrap", "--variant=minbase", "--include=python3,python3-pip,python-is-python3", "--quiet"]
    command += [f"--customize-hook={hook}" for hook in hooks]
    made = subprocess.run([*command, suite, str(folder / "base.tar")], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"NO STAND-IN IMAGE: mmdebstrap {suite}: {made.stderr[-500:]}")
    client = docker.DockerClient(base_url=dockerd["DOCKER_HOST"], timeout=300)
    name, tag = BASE.rsplit(":", 1)
    client.api.import_image_from_file(str(folder / "base.tar"), repository=name, tag=tag)
    client.images.build(path=str(checkout), tag=BUILT, network_mode="host", rm=True)
    return BUILT


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout: the launcher mounts the folder in which it is called."""
    target = tmp_path_factory.mktemp("checkout")
    files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(files, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _start(checkout: Path, image: str, recipe: str, *mounts: str) -> list[str]:
    """The stand-in has no NeMo: this test's own environment is mounted into it, where it lies here."""
    prefixes = sorted({sys.prefix, sys.base_prefix} - {"/usr"})
    file = {
        "image": image,
        "devices_per_node": 2,
        "python": sys.executable,
        "mounts": [*(f"{prefix}:{prefix}:ro" for prefix in prefixes), *mounts],
        "docker": {"network": "host"},
    }
    (checkout / "cluster.yaml").write_text(json.dumps(file))
    start = [sys.executable, "launch.py", "--recipe", recipe, "--executor", "docker"]
    return [*start, "--cluster", "cluster.yaml"]


def _command(checkout: Path, image: str, sample: Path, *words: str) -> list[str]:
    start = _start(checkout, image, "qwen25_tiny", f"{sample}:{sample}:ro")
    paths = [f"data.paths={sample / 'prose'}", "data.index_mapping_dir=cache"]
    return [*start, *words, *paths, "trainer.log_every_n_steps=1", "trainer.val_check_interval=1000"]


@pytest.mark.skipif(not shutil.which("gcc"), reason="SKIPPED FOR LACK OF gcc: no VCCL library is built")
def test_two_ranks_with_a_vccl_of_the_container_and_ctrl_c(
    dockerd: dict[str, str], image: str, checkout: Path, sample: Path, tmp_path: Path
) -> None:
    """The cluster file names a path in the container, which this machine has not; Ctrl-C in step 3 saves."""
    nccl_stub.build(tmp_path)
    command = _command(checkout, image, sample, "--name", "vccl", "--devices", "2")
    file = json.loads((checkout / "cluster.yaml").read_text())
    file["mounts"].append(f"{tmp_path}:/opt/in-the-image/lib:ro")
    file |= {"collectives": "vccl", "env": {"VCCL_LIBRARY": "/opt/in-the-image/lib", "NCCL_IB_HCA": "mlx5_9:1"}}
    (checkout / "cluster.yaml").write_text(json.dumps(file))
    with (tmp_path / "said").open("w") as out:
        launcher = subprocess.Popen(command, cwd=checkout, env=dockerd, stderr=out)
    deadline = time.monotonic() + 300
    while "step 3/" not in (tmp_path / "said").read_text():
        assert time.monotonic() < deadline and launcher.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.2)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=300) == 130, (tmp_path / "said").read_text()
    run = checkout / "runs" / "vccl"
    assert len(list((run / "checkpoints").glob("step-*"))) == 1
    assert "launch.py resume vccl" in (tmp_path / "said").read_text()
    for rank in (0, 1):
        log = (run / f"logs/attempt-1/rank-{rank}.log").read_text()
        assert "VCCL: /opt/in-the-image/lib/libnccl.so.2 (NCCL 2.26.6) is loaded" in log
    assert "-e NCCL_IB_HCA=mlx5_9:1" in (run / "docker/command.txt").read_text()


def test_two_ranks_and_a_blend_that_only_a_mount_holds(
    dockerd: dict[str, str], image: str, checkout: Path, sample: Path, tmp_path: Path
) -> None:
    """Corpora and base are in the container alone: checked, read and recorded there. A missing corpus is said."""
    import docker

    blended.place_data(tmp_path / "store", sample)
    domains = [("code", "new"), ("prose", "replay")]
    blend = {
        "domains": [{"name": n, "folder": f"/inside/corpora/sample/{n}", "role": role} for n, role in domains],
        "replay_share": 0.25,
    }
    (checkout / "blend.yaml").write_text(json.dumps(blend))
    (checkout / "gone.yaml").write_text(json.dumps(blend).replace("/code", "/no-code"))
    start = _start(checkout, image, blended.RECIPE, f"{tmp_path / 'store'}:/inside:ro")
    words = ["resume.base=/inside/models/qwen25-tiny", "data.index_mapping_dir=cache", *blended.WORDS, "--devices", "2"]

    def launch(name: str, blend: str) -> subprocess.CompletedProcess[str]:
        command = [*start, "--name", name, f"data.blend={blend}", *words]
        return subprocess.run(command, cwd=checkout, env=dockerd, capture_output=True, text=True, timeout=300)

    done = launch("inside", "blend.yaml")
    assert done.returncode == 0, done.stderr
    assert "blend: code" in done.stderr
    assert f"step {blended.STEPS}/{blended.STEPS}" in done.stderr and "docker rm -f inside" in done.stderr
    run = checkout / "runs" / "inside"
    assert {path.name for path in (run / "logs/attempt-1").glob("rank-*.log")} == {"rank-0.log", "rank-1.log"}
    left = docker.DockerClient(base_url=dockerd["DOCKER_HOST"]).containers.list(all=True)
    assert left == []  # --rm
    blended.check_records(run)
    blended.check_afterwards(run, tmp_path / "here")
    done = launch("missing", "gone.yaml")
    assert done.returncode == 3 and "/inside/corpora/sample/no-code is not a prepared corpus" in done.stderr, (
        done.stderr
    )


def test_the_image_holds_the_project(dockerd: dict[str, str], image: str) -> None:
    import docker

    client = docker.DockerClient(base_url=dockerd["DOCKER_HOST"])
    listed = client.containers.run(image, ["ls", "/workspace"], network_mode="host", remove=True).decode().split()
    assert {"launch.py", "recipes", "launcher", "docs"} <= set(listed) and not {".venv", "runs"} & set(listed)
    client.containers.run(image, ["python", "-c", "import gigatoken"], network_mode="host", remove=True)


def test_a_failing_rank_fails_the_command(dockerd: dict[str, str], image: str, checkout: Path, sample: Path) -> None:
    (checkout / "taken").write_text("a file where the ranks want a folder")
    command = _command(checkout, image, sample, "--name", "bad", "trainer.max_steps=4")
    command = [word.replace("=cache", "=taken") for word in command]
    done = subprocess.run(command, cwd=checkout, env=dockerd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    said = done.stderr[done.stderr.index("failed first") :]
    assert "Traceback" in said and "taken" in said


def test_a_killed_launcher_and_a_retry(
    dockerd: dict[str, str], image: str, checkout: Path, sample: Path, tmp_path: Path
) -> None:
    """SIGKILL of a rank: a second container takes the name of the first. SIGKILL of the launcher: the ranks save."""
    import docker

    client = docker.DockerClient(base_url=dockerd["DOCKER_HOST"])
    words = ("--name", "alone", "--retries", "1", "--retry-wait", "0", "log.ckpt.every_n_train_steps=1000")
    run, said = checkout / "runs" / "alone", tmp_path / "said"
    with said.open("w") as out:
        launcher = subprocess.Popen(_command(checkout, image, sample, *words), cwd=checkout, env=dockerd, stderr=out)

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + 300
        while text not in said.read_text():
            assert time.monotonic() < deadline and launcher.poll() is None, said.read_text()
            time.sleep(0.2)

    wait_for("step 3/")
    client.containers.get("alone").exec_run(["bash", "-c", f"kill -KILL {_pid(run, 1)}"])
    wait_for("retry 1 of 1")
    wait_for("started:   container alone, 1 rank(s)")
    seen = said.read_text().index("retry 1 of 1")
    deadline = time.monotonic() + 300
    while "step 3/" not in said.read_text()[seen:]:
        assert time.monotonic() < deadline and launcher.poll() is None, said.read_text()
        time.sleep(0.2)
    launcher.kill()
    launcher.wait()
    while client.containers.list(all=True):
        assert time.monotonic() < deadline, (run / "logs/attempt-2/console.log").read_text()
        time.sleep(0.2)
    assert "the launcher outside this container is gone" in (run / "logs/attempt-2/console.log").read_text()
    assert len(list((run / "checkpoints").glob("step-*"))) == 1


def _pid(run: Path, attempt: int) -> int:
    return int(json.loads((run / f"logs/attempt-{attempt}/rank-0.json").read_text())["pid"])


def test_what_is_missing_is_said(dockerd: dict[str, str], checkout: Path, sample: Path) -> None:
    command = _command(checkout, "no-such-image:1", sample, "--name", "none", "trainer.max_steps=4")
    done = subprocess.run(command, cwd=checkout, env=dockerd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "there is no image no-such-image:1" in done.stderr, done.stderr
    away = {**dockerd, "DOCKER_HOST": "unix:///nowhere.sock"}
    done = subprocess.run(command, cwd=checkout, env=away, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Docker does not answer" in done.stderr, done.stderr
